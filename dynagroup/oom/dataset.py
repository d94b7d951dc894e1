"""A whole dataset through a model: planned, safe from running out of memory, and from crashes."""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from dynagroup.budget.base import Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.budget.memory import MemoryBudget
from dynagroup.checks import check_choice, check_int
from dynagroup.errors import ConfigError
from dynagroup.memory import MemoryRegressor, Workload
from dynagroup.memory.protocols import PaddedTokens
from dynagroup.memory.run import Mode
from dynagroup.oom.generate import check_options, generate_with_oom_retry, generation_option
from dynagroup.oom.inference import Pass, Process
from dynagroup.oom.job import Job
from dynagroup.oom.positions import longest_input
from dynagroup.oom.results import TEXTS, VECTORS
from dynagroup.oom.retry import run_with_oom_retry
from dynagroup.oom.split import BatchSplitter
from dynagroup.world import World

if TYPE_CHECKING:
    import torch

__all__ = [
    "Pooling",
    "classify_dataset",
    "embed_dataset",
    "generate_dataset",
    "iter_classify",
    "iter_embed",
    "iter_generate",
]

Pooling: TypeAlias = Literal["mean", "first", "last"]

_memory_by_model: WeakKeyDictionary[Any, dict[tuple[str, int], MemoryRegressor]] = WeakKeyDictionary()
_NEW_TOKENS = 128


def generate_dataset(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    batch_size: int = 16,
    budget: Budget | None = None,
    output: str | Path | None = None,
    max_length: int | None = None,
    max_new_tokens: int | None = None,
    progress: bool = True,
    world: World | None = None,
    learned: LearningBudget | None = None,
    **generate_kwargs: Any,
) -> list[Any]:
    """Generate for every text: what a loop over ``model.generate`` gives, in fewer and fuller batches.

    Batches are planned by length, longest first. One that does not fit after all is split, and the rest is planned again
    with what that taught. Under ``torchrun`` every rank takes its share; all return all results.

    Args:
        batch_size: samples of the longest kind that fit the device; other batches hold more (:class:`~dynagroup.MemoryBudget`).
        budget: what fits, instead of ``batch_size``.
        output: a ``.jsonl`` or ``.parquet`` file, one row a text in input order. Finished samples are kept beside it as
            they come, so that the same call after a crash does only the rest, and once all is done gives it back. Needed on
            several ranks.
        max_length: longer texts are truncated to so many tokens.
        max_new_tokens: tokens generated for a text, at most; default: the generation config's, else 128.
        progress: show samples and tokens a second, and the time left.
        world: ranks that share the work; default: all of ``torch.distributed``, which then wait for each other however
            long it takes.
        learned: what to learn into; its report says what running out of memory has cost.
        generate_kwargs: further arguments of ``generate``.

    Returns:
        The generated texts without their prompts, in input order; lists of them with ``num_return_sequences`` above 1.

    Raises:
        ConfigError: arguments that do not go together; a text that the model has no positions for.
        StateError: ``output``, or what was kept beside it, is of another job or damaged: says what differs, or which file.
        BudgetError: a text does not fit even alone; names it.
    """
    job = _generation(
        model, tokenizer, texts, _Common(batch_size, budget, max_length, progress), max_new_tokens, learned, generate_kwargs
    )  # fmt: skip
    return job.whole(output, world)


def iter_generate(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    batch_size: int = 16,
    budget: Budget | None = None,
    max_length: int | None = None,
    max_new_tokens: int | None = None,
    progress: bool = True,
    skip: Collection[int] = (),
    learned: LearningBudget | None = None,
    **generate_kwargs: Any,
) -> Iterator[tuple[int, Any]]:
    """(index, result) as they come, longest texts first; nothing is kept. Arguments as for :func:`generate_dataset`.

    Args:
        skip: indices of texts that are done already.
    """
    job = _generation(
        model, tokenizer, texts, _Common(batch_size, budget, max_length, progress), max_new_tokens, learned, generate_kwargs
    )  # fmt: skip
    return job.as_they_come(skip)


def embed_dataset(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    pooling: Pooling = "mean",
    normalize: bool = False,
    batch_size: int = 16,
    budget: Budget | None = None,
    output: str | Path | None = None,
    max_length: int | None = None,
    progress: bool = True,
    world: World | None = None,
) -> np.ndarray:
    """One vector a text, float32 (num_texts, features): the last hidden states, pooled over the text's tokens.

    Arguments as for :func:`generate_dataset`; ``output`` may also be a ``.npy`` file.

    Args:
        model: an encoder, or a causal model; of one with a head the part before it (``model.base_model``) is run.
        pooling: "mean" over the text's tokens, or the "first" or "last" of them.
        normalize: scale vectors to length 1.
        max_length: longer texts are truncated to so many tokens; default: to what model and tokenizer are made for (how many
            texts that shortens is logged).

    Raises:
        ConfigError: as there; or the model gives no hidden states.
    """
    common = _Common(batch_size, budget, max_length, progress)
    return _embedding(model, tokenizer, texts, common, pooling, normalize).whole(output, world)


def iter_embed(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    pooling: Pooling = "mean",
    normalize: bool = False,
    batch_size: int = 16,
    budget: Budget | None = None,
    max_length: int | None = None,
    progress: bool = True,
    skip: Collection[int] = (),
) -> Iterator[tuple[int, np.ndarray]]:
    """(index, float32 vector) as they come, longest texts first; nothing is kept. Arguments as for :func:`embed_dataset`.

    Args:
        skip: indices of texts that are done already.
    """
    common = _Common(batch_size, budget, max_length, progress)
    return _embedding(model, tokenizer, texts, common, pooling, normalize).as_they_come(skip)


def classify_dataset(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    batch_size: int = 16,
    budget: Budget | None = None,
    output: str | Path | None = None,
    max_length: int | None = None,
    progress: bool = True,
    world: World | None = None,
) -> np.ndarray:
    """The logits of a sequence classifier, float32 (num_texts, classes). Arguments as for :func:`embed_dataset`."""
    return _classification(model, tokenizer, texts, _Common(batch_size, budget, max_length, progress)).whole(
        output, world
    )


def iter_classify(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    batch_size: int = 16,
    budget: Budget | None = None,
    max_length: int | None = None,
    progress: bool = True,
    skip: Collection[int] = (),
) -> Iterator[tuple[int, np.ndarray]]:
    """(index, float32 logits) as they come, longest texts first; nothing is kept. Arguments as for :func:`iter_embed`."""
    return _classification(model, tokenizer, texts, _Common(batch_size, budget, max_length, progress)).as_they_come(
        skip
    )


@dataclass(frozen=True, slots=True)
class _Common:
    """What all jobs are given alike."""

    batch_size: int
    budget: Budget | None
    max_length: int | None
    progress: bool

    def __post_init__(self) -> None:
        if self.budget is None:
            check_int("batch_size", self.batch_size)
        if self.max_length is not None:
            check_int("max_length", self.max_length)

    def budget_of(self, model: Any, num_texts: int, mode: Mode, max_new_tokens: int = 0) -> Budget:
        """The user's, or one that knows the model."""
        if self.budget is not None:
            return self.budget
        if num_texts <= self.batch_size:  # one batch, known to fit: no reason to look at the model
            return MemoryBudget(self.batch_size, model=PaddedTokens())
        return MemoryBudget(self.batch_size, model=_memory_of(model, mode, max_new_tokens))


def _memory_of(model: Any, mode: Mode, max_new_tokens: int) -> MemoryRegressor:
    """What is known of a model's memory. Looking takes seconds, so it is done once a model."""
    known = _memory_by_model.setdefault(model, {})
    key = mode, max_new_tokens
    if key not in known:
        try:
            workload = Workload.from_model(model, mode, max_new_tokens=max_new_tokens)
        except ConfigError:  # not a model of transformers
            workload = Workload(mode=mode, max_new_tokens=max_new_tokens or None)
        known[key] = MemoryRegressor.pretrained(workload)
    return known[key]


def _generation(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    common: _Common,
    max_new_tokens: int | None,
    learned: LearningBudget | None,
    kwargs: dict[str, Any],
) -> Job:
    check_options(model, kwargs)
    known = learned if learned is not None else LearningBudget()
    new = max_new_tokens if max_new_tokens is not None else generation_option("max_new_tokens", model, kwargs)
    new = check_int("max_new_tokens", _NEW_TOKENS if new is None else new)
    each = generation_option("num_return_sequences", model, kwargs) or 1
    copies = max(generation_option("num_beams", model, kwargs) or 1, each)
    causal = not model.config.is_encoder_decoder
    options = _with_new_tokens(kwargs, new)

    def process(batch: dict[str, Any], indices: Sequence[int]) -> list[Any]:
        done = generate_with_oom_retry(model, batch, learned=known, indices=indices, **options)
        tokens = done.sequences[:, batch["input_ids"].shape[1] :] if causal else done.sequences
        decoded = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return decoded if each == 1 else [decoded[i : i + each] for i in range(0, len(decoded), each)]

    run = Pass(
        model, tokenizer, texts, process, common.budget_of(model, len(texts), "generate", new), max_length=common.max_length,
        learned=known, padding_side="left" if causal else "right", grows=(copies, new), progress=common.progress,
    )  # fmt: skip
    settings = {"task": "generate", "max_length": common.max_length, "max_new_tokens": new, "arguments": kwargs}
    return Job(run, TEXTS, settings, common.progress)


def _with_new_tokens(kwargs: dict[str, Any], max_new_tokens: int) -> dict[str, Any]:
    """In the generation config, where one is given: ``generate`` does not want both."""
    if kwargs.get("generation_config") is None:
        return {**kwargs, "max_new_tokens": max_new_tokens}
    config = copy.deepcopy(kwargs["generation_config"])
    config.max_new_tokens = max_new_tokens
    return {**kwargs, "generation_config": config}


def _embedding(
    model: Any, tokenizer: Any, texts: Sequence[str], common: _Common, pooling: Pooling, normalize: bool
) -> Job:
    check_choice("pooling", pooling, ("mean", "first", "last"))

    def vectors(batch: dict[str, Any]) -> torch.Tensor:
        import torch

        states = _field(model(**batch), "last_hidden_state", "embed", "without its head, as AutoModel loads it")
        pooled = _pool(states, batch["attention_mask"], pooling)
        return torch.nn.functional.normalize(pooled, dim=1) if normalize else pooled

    model = _without_head(model)
    return _forward(model, tokenizer, texts, common, vectors, {"task": f"embed {pooling}", "normalize": int(normalize)})


def _classification(model: Any, tokenizer: Any, texts: Sequence[str], common: _Common) -> Job:
    def logits(batch: dict[str, Any]) -> torch.Tensor:
        way_out = "with a head, as AutoModelForSequenceClassification loads it"
        return _field(model(**batch), "logits", "classify", way_out).float()

    return _forward(model, tokenizer, texts, common, logits, {"task": "classify"})


def _without_head(model: Any) -> Any:
    """The part that gives hidden states: a language model's own output is a number for every word of its vocabulary."""
    module = sys.modules.get("transformers.modeling_utils")  # whoever holds such a model has imported it
    return model.base_model if module is not None and isinstance(model, module.PreTrainedModel) else model


def _field(output: Any, name: str, task: str, way_out: str) -> Any:
    """What is needed of a model's output."""
    found = getattr(output, name, None)
    if found is None:
        has = ", ".join(output) if isinstance(output, Mapping) else type(output).__name__
        raise ConfigError(
            f"to {task} texts takes a model whose output has `{name}`, but it has {has}: give the model {way_out}"
        )
    return found


def _forward(
    model: Any, tokenizer: Any, texts: Sequence[str], common: _Common, outputs: Any, settings: dict[str, Any]
) -> Job:
    """A forward pass without gradients; one row of its output a text."""
    learned = LearningBudget()
    max_length = common.max_length or longest_input(model, tokenizer)
    run = Pass(
        model, tokenizer, texts, _rows_of(outputs, learned), common.budget_of(model, len(texts), "forward"),
        max_length=max_length, learned=learned, padding_side="right",
        says_max_length=common.max_length is None, progress=common.progress,
    )  # fmt: skip
    return Job(run, VECTORS, {**settings, "max_length": max_length}, common.progress)


def _rows_of(outputs: Any, learned: LearningBudget) -> Process:
    def process(batch: dict[str, Any], indices: Sequence[int]) -> np.ndarray:
        import torch

        with torch.inference_mode():
            rows = run_with_oom_retry(
                lambda part: outputs(part).cpu(), batch, split=BatchSplitter(trim="right"), learned=learned,
                indices=indices,
            )  # fmt: skip
        return torch.cat(rows).numpy()

    return process


def _pool(states: torch.Tensor, mask: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    import torch

    num_tokens = mask.sum(1)
    if pooling == "mean":  # summed in float32: bfloat16 cannot count beyond 256
        total = (states * mask.unsqueeze(-1).to(states.dtype)).sum(1, dtype=torch.float32)
        return total / num_tokens.clamp(min=1).unsqueeze(-1)
    position = torch.zeros_like(num_tokens) if pooling == "first" else (num_tokens - 1).clamp(min=0)
    return states[torch.arange(len(states), device=states.device), position].float()
