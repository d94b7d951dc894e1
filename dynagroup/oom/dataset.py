"""A whole dataset through a model: generate, embed or classify; planned, safe from running out of memory and from crashes."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from dynagroup.budget.base import Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.budget.memory import MemoryBudget
from dynagroup.distributed import World
from dynagroup.errors import ConfigError
from dynagroup.lengths import by_position, limit_of
from dynagroup.memory import MemoryRegressor, Workload
from dynagroup.memory.protocols import PaddedTokens
from dynagroup.memory.run import Mode
from dynagroup.oom.formats import Texts, Vectors
from dynagroup.oom.generate import check_options, generate_with_oom_retry, generation_option
from dynagroup.oom.inference import Pass, longest_input
from dynagroup.oom.job import Job
from dynagroup.oom.retry import run_with_oom_retry
from dynagroup.oom.split import BatchSplitter
from dynagroup.validation import check_choice, check_int

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

_NEW_TOKENS = 128
_memory_by_model: WeakKeyDictionary[Any, dict[tuple[str, int], MemoryRegressor]] = WeakKeyDictionary()


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
        model: a transformers model that generates, where it is to run.
        tokenizer: the model's.
        texts: a sequence of strings.
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

    >>> answers = generate_dataset(model, tokenizer, texts, max_new_tokens=64, output="answers.jsonl")  # doctest: +SKIP
    """
    asked = _Asked(model, tokenizer, texts, batch_size, budget, max_length, progress)
    return _generation(asked, max_new_tokens, learned, generate_kwargs).whole(output, world)


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
    asked = _Asked(model, tokenizer, texts, batch_size, budget, max_length, progress)
    return _generation(asked, max_new_tokens, learned, generate_kwargs).as_they_come(skip)


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

    >>> embed_dataset(model, tokenizer, texts, pooling="mean", normalize=True).shape  # doctest: +SKIP
    (1000, 384)
    """
    asked = _Asked(_without_head(model), tokenizer, texts, batch_size, budget, max_length, progress)
    return _embedding(asked, pooling, normalize).whole(output, world)


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

    >>> vectors = {index: vector for index, vector in iter_embed(model, tokenizer, texts)}  # doctest: +SKIP
    """
    asked = _Asked(_without_head(model), tokenizer, texts, batch_size, budget, max_length, progress)
    return _embedding(asked, pooling, normalize).as_they_come(skip)


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
    asked = _Asked(model, tokenizer, texts, batch_size, budget, max_length, progress)
    return _classification(asked).whole(output, world)


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
    asked = _Asked(model, tokenizer, texts, batch_size, budget, max_length, progress)
    return _classification(asked).as_they_come(skip)


@dataclass(slots=True)
class _Asked:
    """The arguments that all tasks have."""

    model: Any
    tokenizer: Any
    texts: Sequence[str]
    batch_size: int
    budget: Budget | None
    max_length: int | None
    progress: bool

    def __post_init__(self) -> None:
        if not callable(getattr(self.model, "parameters", None)):
            raise ConfigError(f"`model` must be a loaded model, but is {self.model!r:.80}; from_pretrained loads one")
        if getattr(self.budget, "layout", "padded") == "packed":
            raise ConfigError(f"`budget` is {self.budget!r}, but these batches are padded: give it layout='padded'")
        self.texts, self.max_length = by_position(self.texts), limit_of(self.max_length)
        if self.budget is None:
            check_int("batch_size", self.batch_size)

    def budget_for(self, mode: Mode, max_new_tokens: int = 0) -> Budget:
        """The user's, or one that knows the model."""
        if self.budget is not None:
            return self.budget
        if len(self.texts) <= self.batch_size:  # one batch, known to fit: no reason to look at the model
            return MemoryBudget(self.batch_size, model=PaddedTokens())
        return MemoryBudget(self.batch_size, model=_memory_of(self.model, mode, max_new_tokens))


def _memory_of(model: Any, mode: Mode, max_new_tokens: int) -> MemoryRegressor:
    """What is known of a model's memory. Looking takes seconds, so it is done once a model."""
    known, key = _memory_by_model.setdefault(model, {}), (mode, max_new_tokens)
    if key not in known:
        try:
            workload = Workload.from_model(model, mode, max_new_tokens=max_new_tokens)
        except ConfigError:  # not a model of transformers
            workload = Workload(mode=mode, max_new_tokens=max_new_tokens or None)
        known[key] = MemoryRegressor.pretrained(workload)
    return known[key]


def _generation(
    asked: _Asked, max_new_tokens: int | None, learned: LearningBudget | None, kwargs: dict[str, Any]
) -> Job:
    model, tokenizer, known = asked.model, asked.tokenizer, learned if learned is not None else LearningBudget()
    if not callable(getattr(model, "generate", None)):
        raise ConfigError(f"`model` must be one that generates, but a {type(model).__name__} has no generate()")
    check_options(model, kwargs)
    new = max_new_tokens if max_new_tokens is not None else generation_option("max_new_tokens", model, kwargs)
    new = check_int("max_new_tokens", _NEW_TOKENS if new is None else new)
    each = generation_option("num_return_sequences", model, kwargs) or 1
    causal, options = not model.config.is_encoder_decoder, _with_new_tokens(kwargs, new)
    if generation_option("stop_strings", model, kwargs):
        options = {**options, "tokenizer": tokenizer}

    def process(batch: dict[str, Any], indices: Sequence[int]) -> list[Any]:
        done = generate_with_oom_retry(model, batch, learned=known, indices=indices, **options)
        tokens = done.sequences[:, batch["input_ids"].shape[1] :] if causal else done.sequences
        decoded = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return decoded if each == 1 else [decoded[i : i + each] for i in range(0, len(decoded), each)]

    run = Pass(
        model=model, tokenizer=tokenizer, texts=asked.texts, process=process, budget=asked.budget_for("generate", new),
        max_length=asked.max_length, learned=known, padding_side="left" if causal else "right", new_tokens=new,
        copies=max(generation_option("num_beams", model, kwargs) or 1, each), progress=asked.progress,
    )  # fmt: skip
    settings = {"task": "generate", "max_length": asked.max_length, "max_new_tokens": new, "arguments": kwargs}
    return Job(run, Texts(), settings)


def _with_new_tokens(kwargs: dict[str, Any], max_new_tokens: int) -> dict[str, Any]:
    """In the generation config, where one is given: ``generate`` does not want both."""
    if kwargs.get("generation_config") is None:
        return {**kwargs, "max_new_tokens": max_new_tokens}
    config = copy.deepcopy(kwargs["generation_config"])
    config.max_new_tokens = max_new_tokens
    return {**kwargs, "generation_config": config}


def _embedding(asked: _Asked, pooling: Pooling, normalize: bool) -> Job:
    check_choice("pooling", pooling, ("mean", "first", "last"))

    def vectors(batch: dict[str, Any]) -> torch.Tensor:
        import torch

        states = _field(asked.model(**batch), "last_hidden_state", "embed", "without its head, as AutoModel loads it")
        pooled = _pool(states, batch["attention_mask"], pooling)
        return torch.nn.functional.normalize(pooled, dim=1) if normalize else pooled

    return _forward(asked, vectors, {"task": f"embed {pooling}", "normalize": int(normalize)})


def _classification(asked: _Asked) -> Job:
    way_out = "with a head, as AutoModelForSequenceClassification loads it"
    logits = lambda batch: _field(asked.model(**batch), "logits", "classify", way_out).float()  # noqa: E731
    return _forward(asked, logits, {"task": "classify"})


def _forward(asked: _Asked, outputs: Callable[[Any], torch.Tensor], settings: dict[str, Any]) -> Job:
    """A forward pass without gradients; one row of its output a text."""
    learned, budget = LearningBudget(), asked.budget_for("forward")
    splitter = BatchSplitter(trim="right", pad_to_multiple_of=budget.pad_to_multiple_of)
    run_whole = lambda part: outputs(part).cpu()  # noqa: E731

    def process(batch: dict[str, Any], indices: Sequence[int]) -> np.ndarray:
        import torch

        with torch.inference_mode():
            rows = run_with_oom_retry(run_whole, batch, split=splitter, learned=learned, indices=indices)
        return torch.cat(rows).numpy()

    max_length = asked.max_length or longest_input(asked.model, asked.tokenizer)
    run = Pass(
        model=asked.model, tokenizer=asked.tokenizer, texts=asked.texts, process=process, budget=budget,
        max_length=max_length, says_max_length=asked.max_length is None, learned=learned, progress=asked.progress,
    )  # fmt: skip
    return Job(run, Vectors(), {**settings, "max_length": max_length})


def _without_head(model: Any) -> Any:
    """The part that gives hidden states: a language model's own output is a number for every word of its vocabulary."""
    module = sys.modules.get("transformers.modeling_utils")  # whoever holds such a model has imported it
    inner = _without_adapter(model)
    return inner.base_model if module is not None and isinstance(inner, module.PreTrainedModel) else model


def _without_adapter(model: Any) -> Any:
    """A model of peft without its outer layer, where its adapters are in the layers beneath, which then still run."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    config, tuner = model.active_peft_config, sys.modules["peft.tuners.tuners_utils"].BaseTuner
    around = config.is_prompt_learning or type(model.base_model).forward is not tuner.forward
    return model if around or getattr(config, "alora_invocation_tokens", None) else model.get_base_model()


def _field(output: Any, name: str, task: str, way_out: str) -> Any:
    """What is needed of a model's output."""
    found = getattr(output, name, None)
    if found is None:
        has = ", ".join(output) if isinstance(output, Mapping) else type(output).__name__
        raise ConfigError(
            f"to {task} texts takes a model whose output has `{name}`, but it has {has}: give the model {way_out}"
        )
    return found


def _pool(states: torch.Tensor, mask: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    import torch

    num_tokens = mask.sum(1)
    if pooling == "mean":  # summed in float32: bfloat16 cannot count beyond 256
        total = (states * mask.unsqueeze(-1).to(states.dtype)).sum(1, dtype=torch.float32)
        return total / num_tokens.clamp(min=1).unsqueeze(-1)
    position = torch.zeros_like(num_tokens) if pooling == "first" else (num_tokens - 1).clamp(min=0)
    return states[torch.arange(len(states), device=states.device), position].float()
