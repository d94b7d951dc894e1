"""Texts as the items of a job: their lengths, their batches, and the budget of the model that runs them."""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from dynagroup.attention import AttentionBackends, attention_kernels, check_attention_backends
from dynagroup.budget.base import Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.budget.memory import MemoryBudget
from dynagroup.budget.tokens import as_budget
from dynagroup.errors import ConfigError
from dynagroup.jobs.formats import VECTORS, Format
from dynagroup.jobs.identity import identity_of_model, identity_of_texts
from dynagroup.jobs.run import Job, Plan
from dynagroup.lengths import limit_of
from dynagroup.memory import MemoryRegressor
from dynagroup.memory.phases import Mode
from dynagroup.memory.protocols import MemoryModel, PaddedTokens
from dynagroup.plan.cost import Work
from dynagroup.plan.few_shapes import few_shapes
from dynagroup.shapes import TOKENS
from dynagroup.text.loader import fields_of, pad_texts
from dynagroup.text.measure import by_position, measure_lengths, tokenized
from dynagroup.update.filling import FillingCollator
from dynagroup.validation import check_identity, check_int

Batch: TypeAlias = dict[str, torch.Tensor]
"""A padded batch on the model's device."""
Encoded: TypeAlias = Mapping[str, Any]
"""What the tokenizer made of the texts of a batch."""

_log = logging.getLogger(__name__)
_BATCH_SIZE = 16
_UNLIMITED = 10**9  # a tokenizer's limit above this means none (it reports 10**30)
_MOST_UNUSED = 8  # rows of a table of positions that no token uses


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The options that all functions over a dataset have; see :func:`~dynagroup.generate_dataset`."""

    batch_size: int | None = None
    budget: Budget | int | None = None
    max_length: int | None = None
    progress: bool = True
    learned: LearningBudget | None = None
    shapes: int | None = None
    attention_backends: AttentionBackends = "auto"
    identity: Any = None
    """As it comes back from JSON."""
    load: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "identity", check_identity(self.identity))
        check_attention_backends(self.attention_backends)
        if self.batch_size is not None and self.budget is not None:
            raise ConfigError(
                f"`batch_size` ({self.batch_size!r}) and `budget` both limit a batch; pass only one of them"
            )
        if self.batch_size is not None:
            check_int("batch_size", self.batch_size)
        if self.budget is not None and as_budget(self.budget).layout == "packed":
            raise ConfigError(
                f"`budget` must have layout='padded', as these batches are padded, but is {self.budget!r}"
            )

    def budget_for(self, lengths: NDArray[np.int32], memory: Callable[[], MemoryModel]) -> Budget:
        """Returns the user's budget, or one for the batch size; bound to the lengths, with the model's ``memory()``."""
        if self.budget is not None:
            budget = as_budget(self.budget).with_memory(memory)
        else:
            batch_size = _BATCH_SIZE if self.batch_size is None else self.batch_size
            is_one_batch = len(lengths) <= batch_size  # fits by assumption, so no trace is needed
            budget = MemoryBudget(batch_size).with_memory(PaddedTokens if is_one_batch else memory)
        budget = budget.bind({TOKENS: lengths})
        if self.shapes is None or len(lengths) == 0:
            return budget
        return few_shapes(self.shapes, lengths, budget, window=len(lengths))


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a model does with texts."""

    run: Callable[[Batch, Encoded], Any]
    """Returns the results of the rows of a batch."""
    settings: Mapping[str, object]
    """On which results depend, besides model, tokenizer and texts."""
    formats: Sequence[Format] = (VECTORS,)
    mode: Mode = "forward"
    memory: Callable[[], MemoryModel] | None = None
    """Makes a model of its memory. None: that of the model in this mode."""
    is_cut_to_model: bool = True
    """Whether texts are truncated to the tokens that the model accepts, unless there is a ``max_length``."""
    tokenizer_options: Mapping[str, Any] = field(default_factory=dict)
    padding_side: Literal["left", "right"] = "right"
    num_copies: int = 1
    """Rows that a text takes in memory, such as beams."""
    num_new: int = 0
    """Tokens that are generated for each text."""


class TextJob(Job):
    """A job over texts, or pairs of texts. Subclasses measure them, run batches, and say what results depend on."""

    num_copies = 1
    num_new = 0

    def __init__(self, texts: Any, options: Mapping[str, Any]) -> None:
        self._options = JobOptions(**options)
        self.items = by_position(texts)
        self.learned = self._options.learned
        self.progress = self._options.progress
        self.load = self._options.load

    def plan(self) -> Plan:
        lengths = self._lengths()
        self.budget = self._options.budget_for(lengths, self._memory)
        return Plan(
            lengths={TOKENS: lengths},
            budget=self.budget,
            work=self._work(),
            num_copies=self.num_copies,
            num_new=self.num_new,
        )

    def attention_kernels(self) -> AbstractContextManager[Any]:
        """Returns a context for a batch: the kernels that its attention may use."""
        varies = self.budget.ladder is None
        return attention_kernels(self._options.attention_backends, varies=varies)

    def _lengths(self) -> NDArray[np.int32]:
        """Returns the tokens of each text. Raises the user's errors."""
        raise NotImplementedError

    def _memory(self) -> MemoryModel:
        raise NotImplementedError

    def _work(self) -> Work:
        """Returns the predicted time of batches."""
        raise NotImplementedError


class TokenizedJob(TextJob):
    """Runs texts through a model with a tokenizer."""

    def __init__(
        self, model: Any, tokenizer: Any, texts: Any, task: Task, options: Mapping[str, Any]
    ) -> None:
        super().__init__(texts, options)
        self.formats = task.formats
        self.num_copies = task.num_copies
        self.num_new = task.num_new
        self._model = model
        self._tokenizer = tokenizer
        self._task = task
        self._device = next(model.parameters()).device
        max_length = self._options.max_length
        self._max_length = limit_of(max_length)
        self._is_cut_to_model = max_length is None and task.is_cut_to_model
        if self._is_cut_to_model:
            self._max_length = most_tokens(model, tokenizer)

    def _lengths(self) -> NDArray[np.int32]:
        lengths: NDArray[np.int32] = measure_lengths(
            self.items,
            self._tokenizer,
            max_length=self._max_length,
            progress=self._options.progress,
        )
        self._check_lengths(lengths)
        return lengths

    def _memory(self) -> MemoryModel:
        if self._task.memory is not None:
            return self._task.memory()
        return MemoryRegressor.of_model(self._model, self._task.mode, max_new_tokens=self.num_new)

    def _work(self) -> Work:
        work = Work.of_known(self._model, device=self._device)
        # Each new token takes a step. Its fixed time counts once for all copies of a text (beams, for example).
        num_steps = max(self.num_new, 1) if self.budget.new_tokens == 0 else 1
        return replace(work, per_step=work.per_step * num_steps / self.num_copies)

    def _check_lengths(self, lengths: NDArray[np.int32]) -> None:
        """Raises ConfigError for texts that have no positions: on a GPU, they would end the process."""
        num_positions = learned_positions(self._model)
        # An encoder-decoder gives new tokens positions of their own; it pads on the right.
        num_new = self.num_new if self._task.padding_side == "left" else 0
        if num_positions is not None:
            too_long = (lengths + num_new > num_positions).nonzero()[0]
            if len(too_long):
                first = too_long[0]
                raise ConfigError(
                    f"{len(too_long)} texts are too long for the model, which has {num_positions} positions: text {first} "
                    f"has {lengths[first]} tokens and {num_new} new ones; truncate with "
                    f"max_length={max(num_positions - num_new, 1)}, or leave them out"
                )
        num_full = int((lengths == self._max_length).sum())
        if self._is_cut_to_model and num_full > 0:
            _log.warning(
                "%d of %d texts have at least %d tokens, the most that the model accepts, and are truncated to them",
                num_full,
                len(lengths),
                self._max_length,
            )

    def run(self, items: list[Any]) -> Any:
        encoded = tokenized(
            self._tokenizer, items, self._max_length, **self._task.tokenizer_options
        )
        batch = pad_texts(
            self._tokenizer,
            fields_of(encoded, items),
            multiple=self.budget.pad_to_multiple_of,
            padding_side=self._task.padding_side,
        )
        if self.budget.ladder is not None:
            pad = {"input_ids": self._tokenizer.pad_token_id}
            batch = FillingCollator(None, self.budget.ladder, pad).fill(batch, len(items))
        on_device = {name: value.to(self._device) for name, value in batch.items()}
        with evaluating(self._model), torch.inference_mode(), self.attention_kernels():
            results = self._task.run(on_device, encoded)
        return results[: len(items)]  # rows after them fill the batch up to its shape

    def identity(self) -> dict[str, object]:
        settings = {**self._task.settings, "max_length": self._max_length}
        of_texts = identity_of_texts(self._tokenizer, self.items, settings, self._options.identity)
        return identity_of_model(self._model) | of_texts


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Context manager that turns off dropout; afterwards each module has its former mode."""
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def most_tokens(model: torch.nn.Module, tokenizer: object) -> int | None:
    """Returns how many tokens of a text model and tokenizer accept; None: they name no limit."""
    limits = [
        getattr(tokenizer, "model_max_length", None),
        stated_positions(model),
        learned_positions(model),
    ]
    stated = [int(limit) for limit in limits if limit is not None and 0 < limit < _UNLIMITED]
    return min(stated, default=None)


def stated_positions(model: object) -> int | None:
    """Returns the positions that a model's config names; None: it names none."""
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        config = config.get_text_config()
    return getattr(config, "max_position_embeddings", None)


def learned_positions(model: torch.nn.Module) -> int | None:
    """Returns for how many tokens a model has learned positions; None: it computes positions, or they are not found."""
    stated = stated_positions(model)
    if stated is None:
        return None
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if not isinstance(module, torch.nn.Embedding) or not ("position" in last or last == "wpe"):
            continue
        if not 0 <= module.num_embeddings - stated <= _MOST_UNUSED:
            continue
        # OPT and BART shift positions by an `offset`; RoBERTa uses those after the padding's.
        num_unused: int = getattr(module, "offset", 0)
        if num_unused == 0 and module.padding_idx is not None:
            num_unused = module.padding_idx + 1
        return module.num_embeddings - num_unused
    return None


def output_of(model: torch.nn.Module, batch: Batch, name: str, way_out: str) -> torch.Tensor:
    """Returns one field of a model's output. ConfigError, with the way out: it has none."""
    values = getattr(model(**batch), name, None)
    if values is None:
        raise ConfigError(f"the output of {type(model).__name__} has no `{name}`; {way_out}")
    return values


def check_tokens(values: torch.Tensor, mask: torch.Tensor) -> None:
    """Raises ConfigError if a model has not returned one row of values per token."""
    if values.shape[:2] != mask.shape:
        raise ConfigError(
            f"the model returned values {tuple(values.shape)} for {mask.shape[0]} texts of {mask.shape[1]} tokens; it must "
            "return one row per token"
        )


def without_padding(values: torch.Tensor, mask: torch.Tensor) -> list[np.ndarray]:
    """Returns the values of each text's tokens, float32 (num_tokens, features); rows are padded on the right."""
    check_tokens(values, mask)
    on_cpu = values.cpu().float().numpy()
    counts = mask.sum(dim=1).tolist()
    return [row[:count].copy() for row, count in zip(on_cpu, counts, strict=True)]


def without_wrapper(model: Any) -> Any:
    """Returns the model that peft has wrapped, with the adapters in its layers. None: the adapter is around the model, as
    in prompt tuning."""
    peft = sys.modules.get("peft")  # not imported here: whoever has a peft model has imported peft
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    return None if model.active_peft_config.is_prompt_learning else model.get_base_model()
