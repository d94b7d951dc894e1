"""Cuts a window of samples into batches that fit, for steps of several ranks, and checks each cut."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget
from dynagroup.errors import BudgetError
from dynagroup.plan.batches import Batches, shapes_of
from dynagroup.plan.multistream import costs_to_balance
from dynagroup.plan.packed import limits_of, pack, share_equally
from dynagroup.plan.padded import OrderedWindow, in_order
from dynagroup.plan.rows import EQUAL, cut_into_steps, levelled
from dynagroup.plan.rules import CutRules
from dynagroup.shapes import IntArray, Streams, primary, units_of


def cut(
    lengths: Streams,
    rules: CutRules,
    num_ranks: int = 1,
    window: tuple[IntArray, OrderedWindow] | None = None,
) -> Batches:
    """Cuts a window into batches that fit, for steps with one batch per rank, with the least predicted time.

    A padded window is sorted, so that neighbours are similar, and cut into runs of neighbours; a packed window is
    filled. The number of batches is a multiple of ``num_ranks`` if any has more than one sample. A sample that does not
    fit even alone is a batch of its own. ``window``: of :func:`windows_in_order`, if it is padded and sorted already.

    Returns positions in the window, step after step: the most expensive step first, one with too few batches last, the
    most expensive batch of a step first. ConfigError, BudgetError: ``round_batch`` or ``budget`` is wrong.
    """
    num_samples = len(lengths[primary(lengths)])
    if num_samples <= num_ranks:  # at most one step: each sample is a batch
        work = rules.work_of_samples(lengths)
        return Batches(np.argsort(-work, kind="stable"), np.arange(num_samples + 1))
    several = costs_to_balance(lengths, rules) if num_ranks > 1 else None
    if rules.packs(lengths):
        return _cut_packed(lengths, rules, num_ranks, several)
    order, ordered = in_order(lengths, rules) if window is None else window
    offsets = cut_into_steps(ordered, num_ranks, rules.work.per_step)
    work = ordered.work_of_cut(offsets)
    runs = Batches(np.arange(num_samples), offsets)
    if several is not None:
        # of batches with nearly equal work, those with similar other costs share a step
        others = np.add.reduceat(several.sum(axis=0)[order], offsets[:-1])
        rounded = np.round(np.log(np.maximum(work, 1.0)) / EQUAL)
        return runs.take(np.lexsort([-others, -rounded])).map(order)
    runs = runs.take(np.argsort(-work, kind="stable"))
    if num_ranks > 1 and not ordered.streams and not len(ordered.limits):
        runs = levelled(ordered, runs, num_ranks)
    return runs.map(order)


def _cut_packed(
    lengths: Streams, rules: CutRules, num_ranks: int, several: NDArray[np.float64] | None
) -> Batches:
    """Packs a window. Ranks share ``several`` costs equally, as long as that takes little more time."""
    by_work = pack(lengths, rules, num_ranks)
    if several is None:
        return by_work
    by_costs = pack(lengths, rules, num_ranks, costs=several.mean(axis=0))
    even = share_equally(by_costs, num_ranks, several, limits_of(lengths, rules.budget))
    longest_time = (1 + EQUAL) * rules.time_of_steps(by_work, lengths, num_ranks)
    if rules.time_of_steps(even, lengths, num_ranks) <= longest_time:
        return even
    return by_work


@dataclass(frozen=True)
class KindGroup:
    """The samples of one kind in a window."""

    positions: IntArray
    lengths: Streams

    def __len__(self) -> int:
        return len(self.positions)


def cut_kinds(
    lengths: Streams,
    kinds: NDArray[np.integer],
    rules: CutRules,
    num_ranks: int,
    *,
    together: bool,
) -> list[Batches]:
    """Cuts like :func:`cut`, but every batch has samples of one kind.

    Returns one cut for each kind, whose steps have this kind only; or with ``together`` one cut, whose steps may have
    batches of several kinds.
    """
    groups = _group_by_kind(lengths, kinds)
    if together and len(groups) > 1:
        return [_cut_mixed_steps(groups, lengths, rules, num_ranks)]
    return [cut(group.lengths, rules, num_ranks).map(group.positions) for group in groups]


def _group_by_kind(lengths: Streams, kinds: NDArray[np.integer]) -> list[KindGroup]:
    """Returns the samples of each kind that occurs, in the order of the kinds' codes."""
    if not kinds.any():
        return [KindGroup(np.arange(len(kinds)), lengths)]
    by_kind = np.argsort(kinds, kind="stable")
    borders = np.flatnonzero(np.diff(kinds[by_kind])) + 1
    groups = []
    for positions in np.split(by_kind, borders):
        of_kind = {name: values[positions] for name, values in lengths.items()}
        groups.append(KindGroup(positions, of_kind))
    return groups


def _cut_mixed_steps(
    groups: list[KindGroup], lengths: Streams, rules: CutRules, num_ranks: int
) -> Batches:
    """Cuts each kind for one rank, then arranges the batches of all kinds in steps of similar work."""
    cuts = [cut(group.lengths, rules) for group in groups]
    num_samples = sum(len(group) for group in groups)
    num_batches = sum(len(batches) for batches in cuts)
    while num_missing := -num_batches % num_ranks:
        if num_batches + num_missing > num_samples:
            break
        cuts = _cut_into_more(groups, cuts, rules, num_missing)
        num_batches = sum(len(batches) for batches in cuts)
    parts = [batches.map(group.positions) for group, batches in zip(groups, cuts, strict=True)]
    joined = Batches.concatenate(parts)
    return joined.take(np.argsort(-rules.work_of(joined, lengths), kind="stable"))


def _cut_into_more(
    groups: list[KindGroup], cuts: list[Batches], rules: CutRules, num_more: int
) -> list[Batches]:
    """Greedy apportionment: the kind with the most work per batch gets one more, again and again.

    Then each kind that got more is cut again. Such a cut may have still more batches.
    """
    shares = [len(batches) for batches in cuts]
    work = []
    for group, batches in zip(groups, cuts, strict=True):
        work.append(float(rules.work_of(batches, group.lengths).sum()))
    for _ in range(num_more):
        can_grow = [kind for kind, group in enumerate(groups) if shares[kind] < len(group)]
        dearest = max(can_grow, key=lambda kind: work[kind] / shares[kind])
        shares[dearest] += 1
    more = []
    for group, batches, share in zip(groups, cuts, shares, strict=True):
        more.append(batches if share == len(batches) else cut(group.lengths, rules, share))
    return more


def prove(
    batches: Batches,
    num_samples: int,
    lengths: Streams,
    budget: Budget,
    oversize: NDArray[np.bool_],
) -> None:
    """Checks that every sample is in one batch, and that every batch fits or is one oversize sample."""
    is_used = np.zeros(num_samples, np.bool_)
    is_used[batches.order] = True
    assert len(batches.order) == num_samples == is_used.sum(), "a plan lost or repeated a sample"
    if not num_samples:
        return
    first_samples = batches.order[batches.offsets[:-1]]
    may_exceed = (batches.sizes == 1) & oversize[first_samples]
    wrong = np.flatnonzero(~budget.fits(shapes_of(batches, lengths)) & ~may_exceed)
    if len(wrong):
        batch = batches[int(wrong[0])]
        longest = {name: values[batch].max(keepdims=True) for name, values in lengths.items()}
        raise BudgetError(
            f"a batch of {len(batch)} samples, longest {units_of(longest, 0)}, does not fit "
            f"{budget.fingerprint}, although a larger one does; correct the budget's `fits`, "
            "and check it with dynagroup.testing.assert_budget_law"
        )
