"""What plans are made from: settings, lengths, kinds, and a budget bound to the lengths. No epoch, no ranks."""

import copy
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget
from dynagroup.budget.tokens import as_budget
from dynagroup.errors import BudgetError, ConfigError
from dynagroup.fingerprint import described, hashed
from dynagroup.lengths import Kinds
from dynagroup.plan.batches import RoundBatch, longest_of, oversize_of, scanned, tokens_of
from dynagroup.plan.cost import Work, check_work
from dynagroup.plan.cut import cut
from dynagroup.plan.epoch import NONE
from dynagroup.plan.order import OrderSource
from dynagroup.plan.padded import FEWEST
from dynagroup.plan.rules import CutRules
from dynagroup.shapes import IntArray, Streams, primary, units_of
from dynagroup.validation import check_choice, check_flag, check_function, check_int, warn_user

Oversize: TypeAlias = Literal["alone", "error", "drop"]
Uneven: TypeAlias = Literal["repeat", "drop"]
OneKind: TypeAlias = Literal["step", "batch"]
InputsT = TypeVar("InputsT", bound="PlanInputs")

SAMPLED = 4096  # lengths from which the size of a window is estimated


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """Settings of how an epoch is cut into batches, explained in :class:`~dynagroup.LengthAwareBatchSampler`."""

    shuffle: bool = False
    window: int | None = None
    seed: int = 0
    hardest_first: int = 1
    round_batch: RoundBatch | None = None
    samples_per_update: int | None = None
    grouping: int | None = None
    strata: int | None = None
    work: Work = field(default_factory=check_work)
    oversize: Oversize = "alone"
    uneven: Uneven = "repeat"
    one_kind: OneKind = "step"

    def __post_init__(self) -> None:
        self._set("shuffle", check_flag("shuffle", self.shuffle))
        for name in ("window", "samples_per_update", "grouping", "strata"):
            value = getattr(self, name)
            if value is not None:
                self._set(name, check_int(name, value, where=" (or None)"))
        for name in ("seed", "hardest_first"):
            self._set(name, check_int(name, getattr(self, name), least=0))
        self._set("work", check_work(self.work))
        check_choice("oversize", self.oversize, get_args(Oversize))
        check_choice("uneven", self.uneven, get_args(Uneven))
        check_choice("one_kind", self.one_kind, get_args(OneKind))
        check_function("round_batch", self.round_batch, "from int to int")
        if self.window is not None and self.samples_per_update is not None:
            raise ConfigError(
                "pass `window` or `samples_per_update`, not both, because an update is a window"
            )
        if self.strata is not None and self.grouping is None:
            raise ConfigError(
                "`strata` needs `grouping`, the number of updates that are dealt together"
            )
        if self.grouping is not None and self.samples_per_update is None:
            raise ConfigError(
                "`grouping` needs `samples_per_update`; without it, raise `window` to sort more samples"
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def identity(self) -> dict[str, Any]:
        """The settings as JSON values, for saved states."""
        values = {setting.name: getattr(self, setting.name) for setting in fields(self)}
        values["round_batch"] = described(self.round_batch)
        values["work"] = described(self.work)
        return values


class PlanInputs:
    """Lengths, kinds, a budget bound to the lengths, and settings. Keeps no state of a run."""

    source_of: IntArray | None = None
    """The source of each sample, if each update has fixed shares of them: int (N,)."""

    def __init__(
        self,
        lengths: Streams,
        budget: Budget | int,
        config: PlanConfig,
        kinds: Kinds | None = None,
    ) -> None:
        self.lengths = lengths
        self.num_samples = len(lengths[primary(lengths)])
        self.kinds = Kinds.read(None, self.num_samples) if kinds is None else kinds
        self.config = config
        self.maxima: dict[str, IntArray] = {}
        self._checksums: dict[str, int] = {}
        for name, values in lengths.items():
            self.maxima[name], self._checksums[name] = scanned(values)
        self.budget = as_budget(budget).bind(lengths)
        self._hold(self.budget.applied)
        self._leave_out()

    def _hold(self, limit: float | None) -> None:
        """Fixes the learned limit, so that a plan does not change while it is used."""
        vars(self).pop("batch_size", None)  # cached, depends on the limit
        self.limit = limit
        self.budget = self.budget.held(limit)
        self.oversize = oversize_of(self.lengths, self.budget, self.maxima)
        """Sorted dataset indices of samples that do not fit even alone."""

    def _leave_out(self) -> None:
        """Decides which samples are planned. BudgetError: some do not fit, and ``oversize="error"``."""
        vars(self).pop("longest", None)  # cached, depends on the samples left out
        self.left_out = self.oversize if self.config.oversize == "drop" else NONE
        """Sorted dataset indices of samples that are not planned."""
        self.left_print = zlib.crc32(self.left_out.astype(np.int64).data)
        if self.config.oversize == "error":
            self.warn_of_oversize()

    def with_limit(self: InputsT, limit: float | None) -> InputsT:
        """Returns these inputs with a learned limit, for plans of the same samples."""
        if limit == self.limit:
            return self
        other = copy.copy(self)
        other._hold(limit)
        return other

    def rebuilt(self: InputsT) -> InputsT:
        """Returns a copy with the budget's current limit, which also decides anew which samples are planned."""
        other = copy.copy(self)
        other._hold(self.budget.applied)
        other._leave_out()
        return other

    def take_sources(self, order: OrderSource) -> None:
        """Makes stratified updates keep the shares that a mixture gives them."""
        if order.mixture is not None and self.config.grouping is not None:
            self.source_of = order.mixture.sources_of(self.num_samples)

    @property
    def num_planned(self) -> int:
        """Number of samples in an epoch, without those that are left out."""
        return self.num_samples - len(self.left_out)

    @property
    def has_updates(self) -> bool:
        """Whether each window is one update, of ``samples_per_update`` samples."""
        return self.config.samples_per_update is not None

    @property
    def has_kinds(self) -> bool:
        """Whether there are samples of several kinds."""
        return len(self.kinds.labels) > 1

    def unfit(self, indices: Sequence[int] | IntArray) -> NDArray[np.bool_]:
        """Returns which of these samples do not fit even alone."""
        left = np.searchsorted(self.oversize, indices, side="left")
        right = np.searchsorted(self.oversize, indices, side="right")
        return left < right

    def tokens_of(self, indices: IntArray | slice) -> NDArray[Any]:
        """Returns the tokens of these samples, summed over padded streams."""
        lengths = {name: values[indices] for name, values in self.lengths.items()}
        return tokens_of(lengths, self.budget)

    @cached_property
    def longest(self) -> int:
        """The dataset index of a planned sample with the most tokens."""
        return longest_of(self.lengths, self.budget, self.left_out, self.maxima)

    @cached_property
    def batch_size(self) -> float:
        """Estimated samples of a batch that is as large as fits, if all samples are sorted together."""
        every = max(1, self.num_samples // SAMPLED)
        some = {name: values[::every] for name, values in self.lengths.items()}
        fewest = cut(some, CutRules(self.budget, Work(per_step=FEWEST)))
        return len(some[primary(some)]) / max(len(fewest), 1)

    def warn_of_oversize(self) -> None:
        """Warns about samples that do not fit even alone, and says what happens to them; "error" raises BudgetError."""
        if not len(self.oversize):
            return
        num = len(self.oversize)
        first = int(self.oversize[0])
        units = units_of(self.lengths, first)
        others = ""
        if num > 1:
            others = f" (one of {num} such samples)"
        if self.config.oversize == "error":
            raise BudgetError(
                f"sample {first} ({units}) does not fit even alone{others}; truncate or filter such "
                "samples, raise the budget, or pass oversize='alone' or 'drop'"
            )
        kept = "left out" if self.config.oversize == "drop" else "a batch of its own"
        warn_user(
            f"sample {first} with {units} does not fit the budget even alone{others} and is {kept}; "
            "truncate it, raise the budget, or pass oversize='error'"
        )

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that a plan depends on, except epoch and number of ranks, as JSON values, for saved states."""
        codes = self.kinds.codes if self.has_kinds else NONE
        return {
            "num_samples": self.num_samples,
            "lengths": self._checksums,
            "kinds": [scanned(codes)[1], described(self.kinds.labels)],
            "budget": self.budget.fingerprint,
            **self.config.identity,
        }

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits, a hash of :attr:`identity`."""
        return hashed(json.dumps(self.identity, sort_keys=True))
