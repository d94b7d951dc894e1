"""One pass of a model over texts: planned by length, safe from running out of memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import UNLIMITED, BoolArray, Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.errors import ConfigError
from dynagroup.lengths import BegunOnce, measure_lengths
from dynagroup.plan.cost import Work
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.shapes import TOKENS, BatchShape, IntArray

__all__ = ["Pass", "Process", "evaluating", "longest_input"]

Process: TypeAlias = "Callable[[dict[str, Any], Sequence[int]], Any]"  # batch, its texts' indices -> a result each
Results: TypeAlias = "Iterator[tuple[list[int], Any]]"

_log = logging.getLogger(__name__)
_UNSET = 10**9  # tokenizers that were told no limit say 10**30


@dataclass(kw_only=True)
class Pass:
    """Texts through a model in planned batches, longest first; once memory has run out, the rest is planned again.

    Args:
        process: what to do with a padded batch.
        budget: what fits.
        max_length: longer texts are truncated to so many tokens.
        says_max_length: say how many texts that concerns: the user did not ask for it.
        learned: what running out of memory teaches.
        padding_side: where batches are padded; the tokenizer itself stays as it is.
        copies, new_tokens: what every text becomes while it is processed.
        progress: show how far it is.

    Raises:
        ConfigError: the tokenizer cannot pad.
    """

    model: Any
    tokenizer: Any
    texts: Sequence[str]
    process: Process
    budget: Budget
    max_length: int | None
    learned: LearningBudget
    padding_side: str = "right"
    copies: int = 1
    new_tokens: int = 0
    says_max_length: bool = False
    progress: bool = False

    def __post_init__(self) -> None:
        if getattr(self.tokenizer, "pad_token_id", None) is None:
            raise ConfigError(
                "`tokenizer` has no padding token; set one, e.g. tokenizer.pad_token = tokenizer.eos_token"
            )
        self._tokens = BegunOnce(self.tokenizer)

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of every text, truncated."""
        return measure_lengths(self.texts, self._tokens, max_length=self.max_length, progress=self.progress)

    @cached_property
    def _bound(self) -> Budget:
        return self.budget.bind({TOKENS: self.lengths})

    @cached_property
    def _work(self) -> Work:
        """Every new token is a step of its own, which costs what any step costs; every copy costs its tokens."""
        work = Work.of_known(self.model, device=self._device)
        return replace(work, per_step=work.per_step * (1 + self.new_tokens) / self.copies)

    @property
    def _device(self) -> Any:
        return next(self.model.parameters()).device

    def prepare(self) -> None:
        """Measure the texts, before anything is run or written.

        Raises:
            ConfigError: a text is longer than the model has positions; names it.
        """
        self._check_positions()
        num_full = int((self.lengths == self.max_length).sum()) if self.says_max_length else 0
        if num_full:
            _log.warning(
                "%d of %d texts have the %d tokens that the model takes, or more; what is more is not seen",
                num_full, len(self.texts), self.max_length,
            )  # fmt: skip

    def results(self, samples: Sequence[int], rank: int = 0, size: int = 1, shown: bool = False) -> Results:
        """(indices, their results) of this rank's share of ``samples``, batch by batch as they come.

        Shares depend on lengths alone: ranks may have learned different things, and have other budgets.
        """
        from tqdm.auto import tqdm

        share = sorted(samples, key=lambda i: (-self.lengths[i], i))[rank::size]
        before = f"{len(self.texts) - len(samples)} done before" if len(samples) < len(self.texts) else None
        total, num_done, began = int(self.lengths[share].sum()), 0, time.perf_counter()
        bar = tqdm(total=total, unit="tok", unit_scale=True, disable=not shown, desc=before)  # time follows tokens
        with evaluating(self.model), bar:
            for indices, results in self._run(share):
                num_done += len(indices)
                rate = num_done / max(time.perf_counter() - began, 1e-9)
                bar.set_postfix_str(f"{num_done}/{len(share)} samples, {rate:.1f} samples/s", refresh=False)
                bar.update(int(self.lengths[indices].sum()))
                yield indices, results

    def _run(self, samples: Sequence[int]) -> Results:
        batches = self._batches(samples)
        while batches:
            known, indices = self.learned.limits, batches.pop(0)
            yield indices, self.process(self._encode(indices), indices)
            if self.learned.limits != known:
                batches = self._batches([i for batch in batches for i in batch])

    def _batches(self, samples: Sequence[int]) -> list[list[int]]:
        if not len(samples):
            return []
        learned = _Grown(self.learned, self.copies, self.new_tokens)
        known = self._bound & learned if self.learned.has_learned else self._bound
        sampler = LengthAwareBatchSampler(self.lengths[list(samples)], known, work=self._work, rank=0, world_size=1)
        return [[samples[i] for i in batch] for batch in sampler]

    def _encode(self, indices: list[int]) -> dict[str, Any]:
        short = {} if self.max_length is None else {"truncation": True, "max_length": self.max_length}
        encoded = self._tokens([self.texts[i] for i in indices], **short)
        # Texts without any token still need one position: an empty tensor has no dtype that an embedding accepts.
        width: Any = {"padding": "longest"} if any(encoded["input_ids"]) else {"padding": "max_length", "max_length": 1}
        padded = self.tokenizer.pad(
            {name: encoded[name] for name in ("input_ids", "attention_mask")},
            **width,
            padding_side=self.padding_side,
            pad_to_multiple_of=self._bound.pad_to_multiple_of,
            return_tensors="pt",
        )
        return {name: padded[name].to(self._device) for name in ("input_ids", "attention_mask")}

    def _check_positions(self) -> None:
        """A model with learned positions has none beyond its table: on a GPU that ends the process."""
        last, new = last_position(self.model), self.new_tokens if self.padding_side == "left" else 0
        over = np.flatnonzero(self.lengths + new > last) if last is not None else []
        if last is not None and len(over):
            more = f" and {new} new ones" if new else ""
            raise ConfigError(
                f"{len(over)} texts are too long for the model, which has {last} positions: text {over[0]} has "
                f"{self.lengths[over[0]]} tokens{more}; truncate with max_length={max(last - new, 1)}, or leave them out"
            )


class _Grown(Budget):
    """What has been learned about whole generations, asked about prompts: every copy grows by the new tokens."""

    def __init__(self, learned: LearningBudget, copies: int, new_tokens: int) -> None:
        self._learned, self._copies, self._new_tokens = learned, copies, new_tokens

    def fits(self, shape: BatchShape, /) -> BoolArray:
        grown = BatchShape.of(shape.num_samples * self._copies, shape.longest[TOKENS] + self._new_tokens)
        return self._learned.allows(grown)

    def largest(self, longest: IntArray, /) -> IntArray | None:
        limit, wall = (min(number, UNLIMITED) for number in (self._learned.limits.limit, self._learned.limits.wall))
        each = self._copies * np.maximum(longest + self._new_tokens, 1)
        return np.minimum(np.floor(limit / each), np.ceil(wall / each) - 1).astype(np.int64)


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Dropout off, and each module's mode as it was afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def longest_input(model: Any, tokenizer: Any) -> int | None:
    """Tokens that model and tokenizer were made for, the least of what they say; None if they say nothing."""
    stated = getattr(_text_config(model), "max_position_embeddings", None)
    said = [getattr(tokenizer, "model_max_length", None), stated, last_position(model)]
    return min((int(n) for n in said if isinstance(n, (int, float)) and 0 < n < _UNSET), default=None)


def last_position(model: Any) -> int | None:
    """Tokens for which a model has learned positions: its table ends there. None for models that compute positions."""
    stated = getattr(_text_config(model), "max_position_embeddings", None)
    for name, module in model.named_modules():
        rows, last = getattr(module, "num_embeddings", None), name.rpartition(".")[2]
        if rows is None or stated is None or not ("position" in last or last == "wpe") or not 0 <= rows - stated <= 8:
            continue
        unused = 0 if getattr(module, "padding_idx", None) is None else module.padding_idx + 1  # RoBERTa
        unused = getattr(module, "offset", unused)  # OPT, BART
        return int(rows - unused) if rows > unused else None
    return None


def _text_config(model: Any) -> Any:
    config = getattr(model, "config", None)
    narrow = getattr(config, "get_text_config", None)
    return config if narrow is None else narrow()
