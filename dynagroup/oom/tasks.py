"""What is done to every text of a dataset: generate, embed or classify. A task and its arguments become a :class:`Job`."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from dynagroup.budget.base import Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.budget.memory import MemoryBudget
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
from dynagroup.tokenizer import as_texts, limit_of
from dynagroup.validation import check_choice, check_int

if TYPE_CHECKING:
    import torch

__all__ = ["Common", "Pooling", "classification", "embedding", "generation"]

Pooling: TypeAlias = Literal["mean", "first", "last"]

_memory_by_model: WeakKeyDictionary[Any, dict[tuple[str, int], MemoryRegressor]] = WeakKeyDictionary()
_NEW_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Common:
    """The arguments that all tasks have: what fits, how much of a text is read, and whether progress is shown."""

    batch_size: int
    budget: Budget | None
    max_length: int | None
    progress: bool

    def __post_init__(self) -> None:
        if self.budget is None:
            check_int("batch_size", self.batch_size)
        object.__setattr__(self, "max_length", limit_of(self.max_length))

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


def generation(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    common: Common,
    max_new_tokens: int | None,
    learned: LearningBudget | None,
    kwargs: dict[str, Any],
) -> Job:
    """The job of generating for every text."""
    texts = as_texts(texts)
    check_options(model, kwargs)
    known = learned if learned is not None else LearningBudget()
    new = max_new_tokens if max_new_tokens is not None else generation_option("max_new_tokens", model, kwargs)
    new = check_int("max_new_tokens", _NEW_TOKENS if new is None else new)
    each = generation_option("num_return_sequences", model, kwargs) or 1
    copies = max(generation_option("num_beams", model, kwargs) or 1, each)
    causal = not model.config.is_encoder_decoder
    options = _with_new_tokens(kwargs, new)
    if generation_option("stop_strings", model, kwargs):
        options = {**options, "tokenizer": tokenizer}

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


def embedding(
    model: Any, tokenizer: Any, texts: Sequence[str], common: Common, pooling: Pooling, normalize: bool
) -> Job:
    """The job of giving every text a vector."""
    check_choice("pooling", pooling, ("mean", "first", "last"))

    def vectors(batch: dict[str, Any]) -> torch.Tensor:
        import torch

        states = _field(model(**batch), "last_hidden_state", "embed", "without its head, as AutoModel loads it")
        pooled = _pool(states, batch["attention_mask"], pooling)
        return torch.nn.functional.normalize(pooled, dim=1) if normalize else pooled

    model = _without_head(model)
    return _forward(model, tokenizer, texts, common, vectors, {"task": f"embed {pooling}", "normalize": int(normalize)})


def classification(model: Any, tokenizer: Any, texts: Sequence[str], common: Common) -> Job:
    """The job of giving every text its logits."""

    def logits(batch: dict[str, Any]) -> torch.Tensor:
        way_out = "with a head, as AutoModelForSequenceClassification loads it"
        return _field(model(**batch), "logits", "classify", way_out).float()

    return _forward(model, tokenizer, texts, common, logits, {"task": "classify"})


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


def _forward(
    model: Any, tokenizer: Any, texts: Sequence[str], common: Common, outputs: Any, settings: dict[str, Any]
) -> Job:
    """A forward pass without gradients; one row of its output a text."""
    texts = as_texts(texts)
    learned = LearningBudget()
    max_length = common.max_length or longest_input(model, tokenizer)
    budget = common.budget_of(model, len(texts), "forward")
    splitter = BatchSplitter(trim="right", pad_to_multiple_of=budget.pad_to_multiple_of)
    run = Pass(
        model, tokenizer, texts, _rows_of(outputs, learned, splitter), budget,
        max_length=max_length, learned=learned, padding_side="right",
        says_max_length=common.max_length is None, progress=common.progress,
    )  # fmt: skip
    return Job(run, VECTORS, {**settings, "max_length": max_length}, common.progress)


def _rows_of(outputs: Any, learned: LearningBudget, splitter: BatchSplitter) -> Process:
    def process(batch: dict[str, Any], indices: Sequence[int]) -> np.ndarray:
        import torch

        with torch.inference_mode():
            rows = run_with_oom_retry(
                lambda part: outputs(part).cpu(), batch, split=splitter, learned=learned, indices=indices
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
