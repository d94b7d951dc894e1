"""Runs a model on a whole dataset (generate, embed, classify) in planned batches; a crashed run continues."""

import copy
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from dynagroup.distributed import World
from dynagroup.errors import ConfigError
from dynagroup.jobs.formats import JSON_LINES
from dynagroup.jobs.run import Job, all_results, results_as_they_come
from dynagroup.jobs.sentences import SentenceJob, is_sentence_transformer
from dynagroup.jobs.texts import JobOptions, Task, TextJob
from dynagroup.oom.generate import check_options, generation_option, is_data, num_copies
from dynagroup.validation import check_choice, check_int

Pooling: TypeAlias = Literal["mean", "first", "last"]

_NEW_TOKENS = 128


def generate_dataset(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    output: str | Path | None = None,
    max_new_tokens: int | None = None,
    world: World | None = None,
    **options: Any,
) -> list[Any]:
    """Generates for every text, like a loop over ``model.generate``, but in fewer and fuller batches, longest first.

    Results do not contain the prompts, and are in input order; with ``num_return_sequences`` above 1 each is a list. A
    batch that does not fit is split. Under ``torchrun`` ranks share the texts, and every rank returns all results.

    Args:
        model: a transformers model that generates, already on its device.
        output: path of a ``.jsonl`` file to write, one row per text in input order; required on several ranks. Finished
            samples are saved beside it: after a crash the same call runs the rest. A complete file is only read.
        max_new_tokens: int, most tokens generated per text. None: the generation config's, else 128.
        world: ranks that share the work. None: all of ``torch.distributed``.
        options: ``batch_size`` (default 16: this many of the longest texts fit the device) or ``budget``;
            ``max_length`` (tokens to which texts are truncated, without new ones, unlike in ``generate``); ``progress``
            (default True: a bar on a terminal); ``learned`` (a :class:`~dynagroup.LearningBudget`); ``identity`` (a text
            or another value for JSON, compared with that of earlier results in ``output``); what ``generate`` takes for
            all samples.

    Raises ConfigError if arguments contradict each other, or a text has more tokens than the model has positions;
    StateError if ``output`` or its journal is damaged or was made with other arguments; BudgetError if a text does not
    fit even alone (the message names it).

    >>> answers = generate_dataset(model, tokenizer, texts, max_new_tokens=64, output="answers.jsonl")  # doctest: +SKIP
    """
    job = _generation(model, tokenizer, texts, max_new_tokens, options)
    return all_results(job, output, world)


def iter_generate(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    max_new_tokens: int | None = None,
    skip: Collection[int] = (),
    **options: Any,
) -> Iterator[tuple[int, Any]]:
    """Yields (index, result) like :func:`generate_dataset`, longest first, except texts in ``skip``; saves nothing."""
    job = _generation(model, tokenizer, texts, max_new_tokens, options)
    return results_as_they_come(job, skip)


def embed_dataset(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    pooling: Pooling | None = None,
    normalize: bool = False,
    output: str | Path | None = None,
    world: World | None = None,
    **options: Any,
) -> np.ndarray:
    """Returns one vector per text, float32 (num_texts, features): last hidden states, pooled over the tokens.

    Args:
        model: an encoder or a causal model; only the part before its head is run (``model.base_model``). Or a
            ``SentenceTransformer``, which runs all its own modules: the vectors are those of ``model.encode(texts)``.
        tokenizer: the model's; None for a ``SentenceTransformer``.
        pooling: "mean" over the text's tokens (the default), or the "first" or "last" token; not for a
            ``SentenceTransformer``, which has its own.
        normalize: True scales vectors to length 1.
        output: path of a ``.npy`` file. ``output``, ``world`` and errors are as in :func:`generate_dataset`.
        options: as in :func:`generate_dataset`, but texts are truncated to what model and tokenizer accept (logged).
            ``shapes``: int, largest number of shapes (samples, tokens) that a compiled model sees.

    >>> embed_dataset(model, tokenizer, texts, pooling="mean", normalize=True).shape  # doctest: +SKIP
    (1000, 384)
    """
    job = _embedding(model, tokenizer, texts, pooling, normalize, options)
    return all_results(job, output, world)


def iter_embed(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    pooling: Pooling | None = None,
    normalize: bool = False,
    skip: Collection[int] = (),
    **options: Any,
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (index, vector) like :func:`embed_dataset`, longest texts first, without those in ``skip``."""
    job = _embedding(model, tokenizer, texts, pooling, normalize, options)
    return results_as_they_come(job, skip)


def classify_dataset(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    output: str | Path | None = None,
    world: World | None = None,
    **options: Any,
) -> np.ndarray:
    """Returns a sequence classifier's logits, float32 (num_texts, classes); arguments as in :func:`embed_dataset`."""
    return all_results(_classification(model, tokenizer, texts, options), output, world)


def iter_classify(
    model: Any, tokenizer: Any, texts: Sequence[str], *, skip: Collection[int] = (), **options: Any
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (index, logits) like :func:`classify_dataset`, longest texts first, without those in ``skip``."""
    return results_as_they_come(_classification(model, tokenizer, texts, options), skip)


def _generation(
    model: Any,
    tokenizer: Any,
    texts: Any,
    max_new_tokens: int | None,
    options: Mapping[str, Any],
) -> Job:
    """Makes a job that generates texts; ``options`` are those of a job and those of ``generate``."""
    names = {field.name for field in fields(JobOptions)} - {"shapes"}
    job_options = {name: value for name, value in options.items() if name in names}
    arguments = {name: value for name, value in options.items() if name not in names}
    check_options(model, arguments)
    for name, value in arguments.items():
        if is_data(value):
            raise ConfigError(
                f"`{name}` is for one batch, but a job makes many batches; leave it out"
            )
    if max_new_tokens is None:
        max_new_tokens = generation_option("max_new_tokens", model, arguments)
    num_new = check_int("max_new_tokens", _NEW_TOKENS if max_new_tokens is None else max_new_tokens)
    is_causal = not model.config.is_encoder_decoder
    num_answers = generation_option("num_return_sequences", model, arguments) or 1
    passed = _generate_arguments(model, tokenizer, arguments, num_new)

    def run(batch: dict[str, torch.Tensor]) -> list[Any]:
        tokens = model.generate(**batch, **passed)
        if is_causal:  # without the prompt
            tokens = tokens[:, batch["input_ids"].shape[1] :]
        answers = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        if num_answers == 1:
            return answers
        starts = range(0, len(answers), num_answers)
        return [answers[start : start + num_answers] for start in starts]

    task = Task(
        run=run,
        settings={"task": "generate", "max_new_tokens": num_new, "arguments": arguments},
        format=JSON_LINES,
        mode="generate",
        padding_side="left" if is_causal else "right",
        num_copies=num_copies(model, arguments),
        num_new=num_new,
    )
    return TextJob(model, tokenizer, texts, task, JobOptions(**job_options)).job()


def _generate_arguments(
    model: Any, tokenizer: Any, arguments: Mapping[str, Any], num_new: int
) -> dict[str, Any]:
    """Returns what ``model.generate`` gets for each batch."""
    passed = dict(arguments)
    if generation_option("stop_strings", model, arguments):  # `generate` looks for them in texts
        passed["tokenizer"] = tokenizer
    config = arguments.get("generation_config")
    if config is None:
        passed["max_new_tokens"] = num_new
    else:  # `generate` refuses max_new_tokens beside a generation_config
        config = copy.deepcopy(config)
        config.max_new_tokens = num_new
        passed["generation_config"] = config
    return passed


def _embedding(
    model: Any,
    tokenizer: Any,
    texts: Any,
    pooling: Pooling | None,
    normalize: bool,
    options: Mapping[str, Any],
) -> Job:
    if is_sentence_transformer(model):
        if pooling is not None or tokenizer is not None:
            raise ConfigError(
                "a SentenceTransformer has its own tokenizer and pooling; pass None for both"
            )
        return SentenceJob(model, texts, normalize, JobOptions(**options)).job()
    how: Pooling = "mean" if pooling is None else pooling
    check_choice("pooling", how, ("mean", "first", "last"))
    encoder = _without_head(model)
    config = getattr(encoder, "config", None)  # a T5 saved from its encoder has no such config
    is_pair = hasattr(encoder, "encoder") or getattr(config, "is_encoder_decoder", False)
    if is_pair and hasattr(encoder, "decoder"):
        raise ConfigError(
            f"a {type(model).__name__} returns its decoder's hidden states; pass model.get_encoder()"
        )

    def run(batch: dict[str, torch.Tensor]) -> np.ndarray:
        states = getattr(encoder(**batch), "last_hidden_state", None)
        if states is None:
            raise ConfigError(
                f"the output of {type(encoder).__name__} has no `last_hidden_state`; give the model without its head, "
                "as AutoModel loads it"
            )
        vectors = _pool(states, batch["attention_mask"], how)
        if normalize:
            vectors = torch.nn.functional.normalize(vectors, dim=1)
        return vectors.cpu().numpy()

    settings = {"task": f"embed {how}", "normalize": int(normalize)}
    task = Task(run=run, settings=settings)
    return TextJob(encoder, tokenizer, texts, task, JobOptions(**options)).job()


def _classification(model: Any, tokenizer: Any, texts: Any, options: Mapping[str, Any]) -> Job:
    def run(batch: dict[str, torch.Tensor]) -> np.ndarray:
        logits = getattr(model(**batch), "logits", None)
        if logits is None or logits.dim() != 2:
            missing = "`logits`" if logits is None else "`logits` of whole texts"
            raise ConfigError(
                f"the output of {type(model).__name__} has no {missing}; give the model with a head for texts: "
                "AutoModelForSequenceClassification; for logits of tokens, run the model over "
                "text_dataloader(texts, tokenizer, budget)"
            )
        return logits.float().cpu().numpy()

    task = Task(run=run, settings={"task": "classify"})
    return TextJob(model, tokenizer, texts, task, JobOptions(**options)).job()


def _without_head(model: Any) -> Any:
    """Returns the part of a model that computes hidden states. Of a peft model these are the layers with the adapters in
    them; an adapter that is around the model (as in prompt tuning) stays."""
    peft = sys.modules.get("peft")  # not imported here: whoever has a peft model has imported peft
    if peft is not None and isinstance(model, peft.PeftModel):
        if model.active_peft_config.is_prompt_learning:
            return model
        model = model.get_base_model()
    return model.base_model if hasattr(model, "base_model_prefix") else model


def _pool(states: torch.Tensor, mask: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """Pools hidden states (samples, tokens, features) to float32 (samples, features); rows are padded on the right."""
    num_tokens = mask.sum(1).clamp(min=1)
    if pooling == "mean":  # summed in float32, because bfloat16 cannot count beyond 256
        shown = states * mask.unsqueeze(-1).to(states.dtype)
        return shown.sum(1, dtype=torch.float32) / num_tokens.unsqueeze(-1)
    position = torch.zeros_like(num_tokens) if pooling == "first" else num_tokens - 1
    rows = torch.arange(len(states), device=states.device)
    return states[rows, position].float()
