"""One pass of a model over a dataset: planned by length, safe from running out of memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import UNLIMITED, BoolArray, Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.errors import ConfigError
from dynagroup.lengths import measure_lengths
from dynagroup.oom.positions import last_position
from dynagroup.plan.cost import Work
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.shapes import TOKENS, BatchShape, IntArray
from dynagroup.tokenizer import BegunOnce

__all__ = ["Pass", "Process", "Results", "evaluating"]

Process: TypeAlias = "Callable[[dict[str, Any], Sequence[int]], Any]"  # batch, its texts' indices -> a result each
Results: TypeAlias = "Iterator[tuple[list[int], Any]]"

_log = logging.getLogger(__name__)


class Pass:
    """Texts through a model in planned batches, longest first; once memory has run out, the rest is planned again.

    Args:
        process: what to do with a padded batch.
        budget: what fits.
        max_length: longer texts are truncated to so many tokens.
        says_max_length: say how many texts that concerns: the user did not ask for it.
        learned: what running out of memory teaches.
        padding_side: where batches are padded; the tokenizer itself stays as it is.
        grows: (copies, new tokens) that every text becomes while it is processed.

    Raises:
        ConfigError: the tokenizer cannot pad.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        texts: Sequence[str],
        process: Process,
        budget: Budget,
        *,
        max_length: int | None,
        learned: LearningBudget,
        padding_side: str,
        grows: tuple[int, int] = (1, 0),
        says_max_length: bool = False,
        progress: bool = False,
    ) -> None:
        if getattr(tokenizer, "pad_token_id", None) is None:
            raise ConfigError(
                "`tokenizer` has no padding token; set one, e.g. tokenizer.pad_token = tokenizer.eos_token"
            )
        self.model, self.tokenizer, self.texts = model, tokenizer, texts
        self._process, self._unbound, self._learned = process, budget, learned
        self._max_length, self._padding_side, self._grows = max_length, padding_side, grows
        self._progress, self._says_max_length = progress, says_max_length

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of every text, truncated."""
        return measure_lengths(self.texts, self._tokens, max_length=self._max_length, progress=self._progress)

    @cached_property
    def _tokens(self) -> BegunOnce:
        return BegunOnce(self.tokenizer)

    @cached_property
    def _budget(self) -> Budget:
        return self._unbound.bind({TOKENS: self.lengths})

    @cached_property
    def _work(self) -> Work:
        """Every new token is a step of its own, which costs what any step costs; every copy costs its tokens."""
        (copies, new_tokens), work = self._grows, Work.of_known(self.model, device=self._device)
        return replace(work, per_step=work.per_step * (1 + new_tokens) / copies)

    @property
    def _device(self) -> Any:
        return next(self.model.parameters()).device

    def prepare(self) -> None:
        """Measure the texts, before anything is run or written.

        Raises:
            ConfigError: a text is longer than the model has positions; names it.
        """
        self._check_positions()
        num_full = int((self.lengths == self._max_length).sum()) if self._says_max_length else 0
        if num_full:
            _log.warning(
                "%d of %d texts have the %d tokens that the model takes, or more; what is more is not seen",
                num_full, len(self.texts), self._max_length,
            )  # fmt: skip

    def results(self, samples: Sequence[int], rank: int = 0, size: int = 1, shown: bool = False) -> Results:
        """(indices, their results) of this rank's share of ``samples``, batch by batch as they come.

        Shares depend on lengths alone: ranks may have learned different things, and have other budgets.
        """
        dealt = sorted(samples, key=lambda i: (-self.lengths[i], i))[rank::size]
        shares = list(self._batches(dealt))
        num_before = len(self.texts) - len(samples)
        with evaluating(self.model), _Bar(self.lengths, num_before, [i for b in shares for i in b], shown) as bar:
            for indices, results in self._run(shares):
                bar.add(indices)
                yield indices, results

    def _run(self, shares: list[list[int]]) -> Results:
        while shares:
            known = self._learned.limits
            for at, indices in enumerate(shares):
                yield indices, self._process(self._encode(indices), indices)
                if self._learned.limits != known:
                    shares = list(self._batches([i for batch in shares[at + 1 :] for i in batch]))
                    break
            else:
                return

    def _batches(self, samples: Sequence[int]) -> Iterator[list[int]]:
        if len(samples):
            known = self._budget & _Grown(self._learned, *self._grows) if self._learned.has_learned else self._budget
            sampler = LengthAwareBatchSampler(self.lengths[list(samples)], known, work=self._work, rank=0, world_size=1)
            yield from ([samples[i] for i in batch] for batch in sampler)

    def _encode(self, indices: list[int]) -> dict[str, Any]:
        short = {} if self._max_length is None else {"truncation": True, "max_length": self._max_length}
        encoded = self._tokens([self.texts[i] for i in indices], **short)
        # Texts without any token still need one position: an empty tensor has no dtype that an embedding accepts.
        width: Any = {"padding": "longest"} if any(encoded["input_ids"]) else {"padding": "max_length", "max_length": 1}
        padded = self.tokenizer.pad(
            {name: encoded[name] for name in ("input_ids", "attention_mask")},
            **width,
            padding_side=self._padding_side,
            pad_to_multiple_of=self._budget.pad_to_multiple_of,
            return_tensors="pt",
        )
        return {name: padded[name].to(self._device) for name in ("input_ids", "attention_mask")}

    def _check_positions(self) -> None:
        """A model with learned positions has none beyond its table: on a GPU that ends the process."""
        last, new = last_position(self.model), self._grows[1] if self._padding_side == "left" else 0
        if last is None:
            return
        over = np.flatnonzero(self.lengths + new > last)
        if len(over):
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


class _Bar:
    """Progress in tokens, which time follows, with samples beside them."""

    def __init__(self, lengths: np.ndarray, num_finished: int, samples: list[int], shown: bool) -> None:
        from tqdm.auto import tqdm

        self._lengths, self._num_samples, self._num_done = lengths, len(samples), 0
        total = int(lengths[samples].sum()) if samples else 0
        before = f"{num_finished} done before" if num_finished else None
        self._bar = tqdm(total=total, unit="tok", unit_scale=True, disable=not shown, desc=before)
        self._started = time.perf_counter()

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, indices: Sequence[int]) -> None:
        self._num_done += len(indices)
        rate = self._num_done / max(time.perf_counter() - self._started, 1e-9)
        self._bar.set_postfix_str(f"{self._num_done}/{self._num_samples} samples, {rate:.1f} samples/s", refresh=False)
        self._bar.update(int(self._lengths[list(indices)].sum()))


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
