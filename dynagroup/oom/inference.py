"""Runs a model on a whole dataset: generate, embed or classify. Runs are planned, and continue after crashes."""

import copy
import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from dynagroup.distributed import World
from dynagroup.errors import ConfigError
from dynagroup.oom.generate import check_options, generated, generation_option, is_data
from dynagroup.oom.jobs import Job, Task
from dynagroup.oom.retry import run_with_oom_retry
from dynagroup.oom.split import BatchSplitter
from dynagroup.oom.storage import TEXTS
from dynagroup.validation import check_choice, check_int

Pooling: TypeAlias = Literal["mean", "first", "last"]

# name in sentence-transformers -> name here
_POOLINGS = {"cls_token": "first", "mean_tokens": "mean", "lasttoken": "last", "cls": "first", "mean": "mean"}
_NEW_TOKENS = 128
_OF_A_JOB = {"batch_size", "budget", "max_length", "progress", "learned"}


def generate_dataset(
    model: Any, tokenizer: Any, texts: Sequence[str], *,
    output: str | Path | None = None, max_new_tokens: int | None = None, world: World | None = None, **options: Any,
) -> list[Any]:  # fmt: skip
    """Generate for every text, like a loop over ``model.generate``, in fewer and fuller batches, longest texts first.

    Results come without the prompts, in input order; each is a list if ``num_return_sequences`` is above 1. A batch
    that does not fit after all is split. Under ``torchrun`` every rank takes its share; all return all results.

    Args:
        model: a transformers model that generates, on the device where it is to run.
        output: a ``.jsonl`` file, one row per text in input order. Finished samples are kept beside it: after a crash
            the same call does only the rest, and once all is done it only reads the file. Needed on several ranks.
        max_new_tokens: most tokens generated per text; default: the generation config's, else 128.
        world: ranks that share the work; default: all of ``torch.distributed``.
        options: ``batch_size`` (16; samples of the longest kind that fit the device) or ``budget``; ``max_length``
            (tokens of a text before it is truncated, without new ones, unlike in ``generate``); ``progress`` (True);
            ``learned``, a :class:`~dynagroup.LearningBudget`; arguments of ``generate`` that suit every batch.

    Raises:
        ConfigError: arguments contradict each other, or a text is longer than the model's positions.
        StateError: ``output``, or what was kept beside it, is damaged or of another job; names what differs.
        BudgetError: a text does not fit even alone; names it.

    >>> answers = generate_dataset(model, tokenizer, texts, max_new_tokens=64, output="answers.jsonl")  # doctest: +SKIP
    """
    return _generation(model, tokenizer, texts, max_new_tokens, **options).whole(output, world)


def iter_generate(
    model: Any, tokenizer: Any, texts: Sequence[str], *,
    max_new_tokens: int | None = None, skip: Collection[int] = (), **options: Any,
) -> Iterator[tuple[int, Any]]:  # fmt: skip
    """Yield (index, result) as :func:`generate_dataset` makes them, longest first, except ``skip``; unsaved."""
    return _generation(model, tokenizer, texts, max_new_tokens, **options).as_they_come(skip)


def embed_dataset(
    model: Any, tokenizer: Any, texts: Sequence[str], *, pooling: Pooling = "mean", normalize: bool = False,
    output: str | Path | None = None, world: World | None = None, **options: Any,
) -> np.ndarray:  # fmt: skip
    """One vector per text, float32 (num_texts, features): the last hidden states, pooled over the text's tokens.

    Args:
        model: an encoder or a causal model; of a model with a head only the part before it runs (``model.base_model``).
        pooling: "mean" over the text's tokens, or the "first" or "last" of them.
        normalize: scale vectors to length 1.
        output: a ``.npy`` file. Otherwise ``output``, ``world`` and errors are as for :func:`generate_dataset`.
        options: as there, but texts are truncated to what model and tokenizer take (how many is logged). Also
            ``shapes``: most shapes (samples, tokens) that a compiled model sees.

    >>> embed_dataset(model, tokenizer, texts, pooling="mean", normalize=True).shape  # doctest: +SKIP
    (1000, 384)
    """
    return Job(_embedding(model, pooling, normalize), tokenizer, texts, **options).whole(output, world)


def iter_embed(
    model: Any, tokenizer: Any, texts: Sequence[str], *,
    pooling: Pooling = "mean", normalize: bool = False, skip: Collection[int] = (), **options: Any,
) -> Iterator[tuple[int, np.ndarray]]:  # fmt: skip
    """Yield (index, vector) as :func:`embed_dataset` makes them, like :func:`iter_generate`."""
    return Job(_embedding(model, pooling, normalize), tokenizer, texts, **options).as_they_come(skip)


def classify_dataset(
    model: Any, tokenizer: Any, texts: Sequence[str], *,
    output: str | Path | None = None, world: World | None = None, **options: Any,
) -> np.ndarray:  # fmt: skip
    """The logits of a sequence classifier, float32 (num_texts, classes). Arguments as for :func:`embed_dataset`."""
    return Job(_classification(model), tokenizer, texts, **options).whole(output, world)


def iter_classify(
    model: Any, tokenizer: Any, texts: Sequence[str], *, skip: Collection[int] = (), **options: Any
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (index, logits) as :func:`classify_dataset` makes them, like :func:`iter_generate`."""
    return Job(_classification(model), tokenizer, texts, **options).as_they_come(skip)


def encode(name: str | Path, texts: Sequence[str], *, batch_size: int = 32, **options: Any) -> np.ndarray:
    """:func:`embed_dataset` for a model's folder or name, on the GPU if there is one, with the folder's own settings.

    The vectors of a sentence-transformers model equal those of ``SentenceTransformer(name).encode(texts)``; any other
    model is pooled by "mean". ``options`` are those of :func:`embed_dataset` and override the folder's settings.

    Raises:
        ConfigError: the folder asks for more than pooling and normalising.

    >>> encode("sentence-transformers/all-MiniLM-L6-v2", texts).shape  # doctest: +SKIP
    (1000, 384)
    """
    from transformers import AutoModel, AutoTokenizer

    how = _recipe_of(str(name)) | options
    model = AutoModel.from_pretrained(str(name)).eval().to("cuda" if torch.cuda.is_available() else "cpu")
    return embed_dataset(model, AutoTokenizer.from_pretrained(str(name)), texts, batch_size=batch_size, **how)


def _recipe_of(name: str) -> dict[str, Any]:
    """The settings in a sentence-transformers folder; empty for any other."""
    modules = _read(name, "modules.json")
    if not modules:
        return {}
    kinds = {module["type"].rpartition(".")[2]: module["path"] for module in modules}
    unknown = sorted(kinds.keys() - {"Transformer", "Pooling", "Normalize"})
    config = _read(name, f"{kinds['Pooling']}/config.json") if "Pooling" in kinds else {"pooling_mode": "mean"}
    asked = [key.removeprefix("pooling_mode_") for key, on in config.items() if key.startswith("pooling_mode_") and on]
    asked += [mode for mode in [config.get("pooling_mode")] if isinstance(mode, str)]
    if unknown or len(asked) != 1 or asked[0] not in _POOLINGS:
        raise ConfigError(f"{name!r} pools by {asked} and has the modules {unknown}; use sentence-transformers for it")
    limit = _read(name, "sentence_bert_config.json").get("max_seq_length")
    return {"pooling": _POOLINGS[asked[0]], "normalize": "Normalize" in kinds, "max_length": limit}


def _read(name: str, file: str) -> Any:
    """The content of a JSON file in a model's folder; empty if there is no such file."""
    from transformers.utils.hub import cached_file

    path = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    return {} if path is None else json.loads(Path(path).read_text(encoding="utf-8"))


def _generation(model: Any, tokenizer: Any, texts: Any, max_new_tokens: int | None, **options: Any) -> Job:
    """A job that generates texts. ``options``: those of a job, and those of ``generate``."""
    of_job = {name: options[name] for name in _OF_A_JOB & options.keys()}
    kwargs = {name: value for name, value in options.items() if name not in of_job}
    check_options(model, kwargs)
    wrong = [name for name, value in kwargs.items() if is_data(value)]
    if wrong:
        raise ConfigError(f"`{wrong[0]}` belongs to one batch, and a job makes its batches itself; leave it out")
    option = lambda name: generation_option(name, model, kwargs)  # noqa: E731
    new = max_new_tokens if max_new_tokens is not None else option("max_new_tokens")
    new_tokens = check_int("max_new_tokens", _NEW_TOKENS if new is None else new)
    is_causal, each = not model.config.is_encoder_decoder, option("num_return_sequences") or 1
    how = dict(kwargs, tokenizer=tokenizer) if option("stop_strings") else dict(kwargs)
    if how.get("generation_config") is None:
        how["max_new_tokens"] = new_tokens
    else:  # `generate` refuses both at once
        how["generation_config"] = copy.deepcopy(how["generation_config"])
        how["generation_config"].max_new_tokens = new_tokens

    def process(job: Job, batch: dict[str, Any], indices: Sequence[int]) -> list[Any]:
        tokens = generated(model, batch, how, job.learned, indices).output
        tokens = tokens[:, batch["input_ids"].shape[1] :] if is_causal else tokens
        found = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return found if each == 1 else [found[i : i + each] for i in range(0, len(found), each)]

    task = Task(
        model=model, process=process, kind=TEXTS, mode="generate", new_tokens=new_tokens,
        settings={"task": "generate", "max_new_tokens": new_tokens, "arguments": kwargs},
        padding_side="left" if is_causal else "right", copies=max(option("num_beams") or 1, each),
    )  # fmt: skip
    return Job(task, tokenizer, texts, **of_job)


def _forward(model: Any, name: str, wanted: str, rows_of: Callable[[torch.Tensor, Any], Any], **settings: Any) -> Task:
    """A forward pass without gradients; ``rows_of`` makes a row per text of one output field and the attention mask."""

    def outputs(batch: dict[str, Any]) -> torch.Tensor:
        output = model(**batch)
        found = getattr(output, name, None)
        if found is None:
            raise ConfigError(f"the output of {type(model).__name__} has no `{name}`; give the model {wanted}")
        return rows_of(found, batch["attention_mask"]).float().cpu()

    def process(job: Job, batch: dict[str, Any], indices: Sequence[int]) -> np.ndarray:
        splitter = BatchSplitter(pad_to_multiple_of=job.budget.pad_to_multiple_of)
        with torch.inference_mode():
            rows = run_with_oom_retry(outputs, batch, split=splitter, learned=job.learned, indices=indices)
        return torch.cat(rows)[: len(indices)].numpy()  # without the rows of a filled batch

    return Task(model=model, process=process, settings=settings)


def _embedding(model: Any, pooling: Pooling, normalize: bool) -> Task:
    check_choice("pooling", pooling, ("mean", "first", "last"))
    inner = _without_head(model)
    if getattr(getattr(inner, "config", None), "is_encoder_decoder", False) and hasattr(inner, "decoder"):
        raise ConfigError(f"the hidden states of a {type(model).__name__} are its decoder's: use model.get_encoder()")
    rows_of = lambda states, mask: _pool(states, mask, pooling, normalize)  # noqa: E731
    wanted = "without its head, as AutoModel loads it"
    return _forward(inner, "last_hidden_state", wanted, rows_of, task=f"embed {pooling}", normalize=int(normalize))


def _classification(model: Any) -> Task:
    wanted = "with a head, as AutoModelForSequenceClassification loads it"
    return _forward(model, "logits", wanted, lambda logits, _: logits, task="classify")


def _without_head(model: Any) -> Any:
    """The part of a model that gives hidden states; a language model itself gives logits over its vocabulary. A peft
    model loses its outer layer if its adapters are in the layers beneath, where they still run."""
    inner, peft = model, sys.modules.get("peft")  # whoever holds such a model has imported it
    if peft is not None and isinstance(model, peft.PeftModel):
        config, tuner = model.active_peft_config, sys.modules["peft.tuners.tuners_utils"].BaseTuner
        around = config.is_prompt_learning or type(model.base_model).forward is not tuner.forward
        inner = model if around or getattr(config, "alora_invocation_tokens", None) else model.get_base_model()
    return inner.base_model if hasattr(type(inner), "base_model_prefix") else model


def _pool(states: torch.Tensor, mask: torch.Tensor, pooling: Pooling, normalize: bool) -> torch.Tensor:
    num_tokens = mask.sum(1).clamp(min=1)
    if pooling == "mean":  # summed in float32: bfloat16 cannot count beyond 256
        total = (states * mask.unsqueeze(-1).to(states.dtype)).sum(1, dtype=torch.float32)
        pooled = total / num_tokens.unsqueeze(-1)
    else:
        position = torch.zeros_like(num_tokens) if pooling == "first" else num_tokens - 1
        pooled = states[torch.arange(len(states), device=states.device), position].float()
    return torch.nn.functional.normalize(pooled, dim=1) if normalize else pooled
