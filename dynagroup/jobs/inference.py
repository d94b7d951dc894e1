"""Runs a model on a whole dataset (generate, embed, classify) in planned batches; a crashed run continues."""

import copy
import inspect
import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from dynagroup.distributed import World
from dynagroup.errors import ConfigError
from dynagroup.jobs.job import Job, Task
from dynagroup.jobs.storage import TEXTS
from dynagroup.oom.generate import check_options, generated, generation_option, is_data
from dynagroup.oom.retry import run_with_oom_retry
from dynagroup.oom.split import BatchSplitter
from dynagroup.validation import check_choice, check_int

Pooling: TypeAlias = Literal["mean", "first", "last"]

# Pooling: its name in sentence-transformers -> its name here.
_POOLINGS = {
    "cls_token": "first",
    "mean_tokens": "mean",
    "lasttoken": "last",
    "cls": "first",
    "mean": "mean",
}
_NEW_TOKENS = 128
_OF_A_JOB = {"batch_size", "budget", "max_length", "progress", "learned", "identity"}


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
            (default True); ``learned`` (a :class:`~dynagroup.LearningBudget`); ``identity`` (a text or another value for
            JSON, compared with that of earlier results in ``output``); what ``generate`` takes for all samples.

    Raises ConfigError if arguments contradict each other, or a text has more tokens than the model has positions;
    StateError if ``output`` or its journal is damaged or was made with other arguments; BudgetError if a text does not
    fit even alone (the message names it).

    >>> answers = generate_dataset(model, tokenizer, texts, max_new_tokens=64, output="answers.jsonl")  # doctest: +SKIP
    """
    return _generation(model, tokenizer, texts, max_new_tokens, **options).whole(output, world)


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
    return _generation(model, tokenizer, texts, max_new_tokens, **options).as_they_come(skip)


def embed_dataset(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    pooling: Pooling = "mean",
    normalize: bool = False,
    output: str | Path | None = None,
    world: World | None = None,
    **options: Any,
) -> np.ndarray:
    """Returns one vector per text, float32 (num_texts, features): last hidden states, pooled over the tokens.

    Args:
        model: an encoder or a causal model; only the part before its head is run (``model.base_model``).
        pooling: "mean" over the text's tokens, or the "first" or "last" token.
        normalize: True scales vectors to length 1.
        output: path of a ``.npy`` file. ``output``, ``world`` and errors are as in :func:`generate_dataset`.
        options: as in :func:`generate_dataset`, but texts are truncated to what model and tokenizer accept (logged).
            ``shapes``: int, largest number of shapes (samples, tokens) that a compiled model sees.

    >>> embed_dataset(model, tokenizer, texts, pooling="mean", normalize=True).shape  # doctest: +SKIP
    (1000, 384)
    """
    return Job(_embedding(model, pooling, normalize), tokenizer, texts, **options).whole(
        output, world
    )


def iter_embed(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    pooling: Pooling = "mean",
    normalize: bool = False,
    skip: Collection[int] = (),
    **options: Any,
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (index, vector) like :func:`embed_dataset`, longest texts first, without those in ``skip``."""
    return Job(_embedding(model, pooling, normalize), tokenizer, texts, **options).as_they_come(
        skip
    )


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
    return Job(_classification(model), tokenizer, texts, **options).whole(output, world)


def iter_classify(
    model: Any, tokenizer: Any, texts: Sequence[str], *, skip: Collection[int] = (), **options: Any
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (index, logits) like :func:`classify_dataset`, longest texts first, without those in ``skip``."""
    return Job(_classification(model), tokenizer, texts, **options).as_they_come(skip)


def encode(
    name: str | Path, texts: Sequence[str], *, batch_size: int = 32, **options: Any
) -> np.ndarray:
    """Embeds texts like :func:`embed_dataset`, by a model's name or folder, with its own settings, on a GPU if any.

    Vectors of a sentence-transformers model equal those of ``SentenceTransformer(name).encode(texts)``; other models
    use pooling "mean". ``options`` (:func:`embed_dataset`) override the folder's. ConfigError: further modules, changed texts.

    >>> encode("sentence-transformers/all-MiniLM-L6-v2", texts).shape  # doctest: +SKIP
    (1000, 384)
    """
    from transformers import AutoModel, AutoTokenizer

    how = _recipe_of(str(name)) | options
    model = (
        AutoModel.from_pretrained(str(name))
        .eval()
        .to("cuda" if torch.cuda.is_available() else "cpu")
    )
    return embed_dataset(
        model, AutoTokenizer.from_pretrained(str(name)), texts, batch_size=batch_size, **how
    )


def _recipe_of(name: str) -> dict[str, Any]:
    if not (modules := _read(name, "modules.json")):
        return {}
    kinds = {module["type"].rpartition(".")[2]: module["path"] for module in modules}
    unknown = sorted(kinds.keys() - {"Transformer", "Pooling", "Normalize"})
    config = (
        _read(name, f"{kinds['Pooling']}/config.json")
        if "Pooling" in kinds
        else {"pooling_mode": "mean"}
    )
    asked = [
        key.removeprefix("pooling_mode_")
        for key, on in config.items()
        if key.startswith("pooling_mode_") and on
    ]
    asked += [mode for mode in [config.get("pooling_mode")] if isinstance(mode, str)]
    if unknown or len(asked) != 1 or asked[0] not in _POOLINGS:
        raise ConfigError(
            f"{name!r} has the pooling {asked} and the modules {unknown}, unknown here; use sentence-transformers"
        )
    own, more = (
        _read(name, "sentence_bert_config.json"),
        _read(name, "config_sentence_transformers.json"),
    )
    odd = [
        k
        for k, v in {**own, **more}.items()
        if v and k.endswith(("do_lower_case", "truncate_dim", "_args", "_kwargs"))
    ]
    if odd := odd + ["default_prompt_name"] * bool(
        (more.get("prompts") or {}).get(more.get("default_prompt_name"))
    ):
        raise ConfigError(
            f"{name!r} changes texts, weights or vectors ({', '.join(odd)}); use sentence-transformers"
        )
    return {
        "pooling": _POOLINGS[asked[0]],
        "normalize": "Normalize" in kinds,
        "max_length": own.get("max_seq_length"),
    }


def _read(name: str, file: str) -> Any:
    from transformers.utils.hub import cached_file

    path = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    return {} if path is None else json.loads(Path(path).read_text(encoding="utf-8"))


def _generation(
    model: Any, tokenizer: Any, texts: Any, max_new_tokens: int | None, **options: Any
) -> Job:
    """Makes a job that generates texts; ``options`` are those of a job and those of ``generate``."""
    of_job = {name: options[name] for name in _OF_A_JOB & options.keys()}
    kwargs = {name: value for name, value in options.items() if name not in of_job}
    check_options(model, kwargs)
    wrong = [name for name, value in kwargs.items() if is_data(value)]
    if wrong:
        raise ConfigError(
            f"`{wrong[0]}` is for one batch, but a job makes many batches; leave it out"
        )
    option = lambda name: generation_option(name, model, kwargs)  # noqa: E731
    new = max_new_tokens if max_new_tokens is not None else option("max_new_tokens")
    new_tokens = check_int("max_new_tokens", _NEW_TOKENS if new is None else new)
    is_causal, each = not model.config.is_encoder_decoder, option("num_return_sequences") or 1
    how = dict(kwargs, tokenizer=tokenizer) if option("stop_strings") else dict(kwargs)
    if how.get("generation_config") is None:
        how["max_new_tokens"] = new_tokens
    else:  # `generate` refuses max_new_tokens beside a generation_config
        how["generation_config"] = copy.deepcopy(how["generation_config"])
        how["generation_config"].max_new_tokens = new_tokens

    def process(job: Job, batch: dict[str, Any], indices: Sequence[int]) -> list[Any]:
        tokens = generated(model, batch, how, job.learned, indices).output
        tokens = tokens[:, batch["input_ids"].shape[1] :] if is_causal else tokens
        found = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return found if each == 1 else [found[i : i + each] for i in range(0, len(found), each)]

    task = Task(
        model=model,
        process=process,
        kind=TEXTS,
        mode="generate",
        new_tokens=new_tokens,
        settings={"task": "generate", "max_new_tokens": new_tokens, "arguments": kwargs},
        padding_side="left" if is_causal else "right",
        copies=max(option("num_beams") or 1, each),
    )
    return Job(task, tokenizer, texts, **of_job)


def _forward(
    model: Any, name: str, wanted: str, rows_of: Callable[[torch.Tensor, Any], Any], **settings: Any
) -> Task:
    """Makes a task of forward passes without gradients; ``rows_of`` makes rows of one output field and the mask."""

    def outputs(batch: dict[str, Any]) -> torch.Tensor:
        found = getattr(model(**batch), name, None)
        if found is None or (
            name == "logits" and found.dim() != 2
        ):  # a causal model's logits are of tokens
            told = (
                f"{type(model).__name__} has no `{name}`{' of whole texts' * (found is not None)}"
            )
            raise ConfigError(f"the output of {told}; give the model {wanted}")
        return rows_of(found, batch["attention_mask"]).float().cpu()

    def process(job: Job, batch: dict[str, Any], indices: Sequence[int]) -> np.ndarray:
        splitter = BatchSplitter(pad_to_multiple_of=job.budget.pad_to_multiple_of)
        with torch.inference_mode():
            rows = run_with_oom_retry(
                outputs, batch, split=splitter, learned=job.learned, indices=indices
            )
        return torch.cat(rows)[
            : len(indices)
        ].numpy()  # without rows that were added to get a fixed shape

    return Task(model=model, process=process, settings=settings)


def _embedding(model: Any, pooling: Pooling, normalize: bool) -> Task:
    check_choice("pooling", pooling, ("mean", "first", "last"))
    inner = _without_head(model)
    decodes = getattr(getattr(inner, "config", None), "is_encoder_decoder", False) and hasattr(
        inner, "decoder"
    )
    if decodes or "decoder_input_ids" in inspect.signature(inner.forward).parameters:
        raise ConfigError(
            f"a {type(model).__name__} returns its decoder's hidden states; pass model.get_encoder()"
        )
    rows_of = lambda states, mask: _pool(states, mask, pooling, normalize)  # noqa: E731
    wanted = "without its head, as AutoModel loads it"
    return _forward(
        inner,
        "last_hidden_state",
        wanted,
        rows_of,
        task=f"embed {pooling}",
        normalize=int(normalize),
    )


def _classification(model: Any) -> Task:
    return _forward(
        model,
        "logits",
        "with a head for texts: AutoModelForSequenceClassification; for logits of tokens, "
        "run the model over text_dataloader(texts, tokenizer, budget)",
        lambda rows, _: rows,
        task="classify",
    )


def _without_head(model: Any) -> Any:
    """Returns the part of a model that computes hidden states. The outer layer of a peft model is left out if the
    adapters are in the layers below, where they still run."""
    inner, peft = (
        model,
        sys.modules.get("peft"),
    )  # not imported here: whoever has a peft model has imported peft
    if peft is not None and isinstance(model, peft.PeftModel):
        config, tuner = model.active_peft_config, sys.modules["peft.tuners.tuners_utils"].BaseTuner
        around = config.is_prompt_learning or type(model.base_model).forward is not tuner.forward
        inner = (
            model
            if around or getattr(config, "alora_invocation_tokens", None)
            else model.get_base_model()
        )
    return inner.base_model if hasattr(type(inner), "base_model_prefix") else model


def _pool(
    states: torch.Tensor, mask: torch.Tensor, pooling: Pooling, normalize: bool
) -> torch.Tensor:
    num_tokens = mask.sum(1).clamp(min=1)
    if pooling == "mean":  # summed in float32, because bfloat16 cannot count beyond 256
        pooled = (states * mask.unsqueeze(-1).to(states.dtype)).sum(
            1, dtype=torch.float32
        ) / num_tokens.unsqueeze(-1)
    else:
        position = torch.zeros_like(num_tokens) if pooling == "first" else num_tokens - 1
        pooled = states[torch.arange(len(states), device=states.device), position].float()
    return torch.nn.functional.normalize(pooled, dim=1) if normalize else pooled
