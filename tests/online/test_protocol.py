"""The alignment protocol as an explicit-state model, explored exhaustively with the loader's own decision functions.

A rank is (queued batches, windows handed out, batches made so far, where it stands), batches by kind. What a window holds is
unknown until it is taken, so taking one branches into every number of batches. Ranks interleave freely between exchanges. How
batches are split at the end depends on their sizes only; that part is explored over all multisets of sizes.
"""

from functools import cache
from itertools import chain, combinations_with_replacement, product
from operator import add, le

import pytest

from dynagroup.online.protocol import Agreement, agree, even_parts, hand_out, offer

LOADING = 0
WAITING = 1
MOST_BATCHES = 4
LOW_WATER = 3


def added(counts, others):
    return tuple(map(add, counts, others))


def by_kind(function, queues):
    """The function's value of each kind's batches on all ranks."""
    return [function(counts) for counts in zip(*queues, strict=True)]


class Explorer:
    """All states that ranks can reach; the laws are checked in every one of them.

    Args:
        windows: windows that each rank was handed out when the exploration starts.
        extra: windows not handed out yet; each exchange gives them to the ranks with the smallest loads.
        every_interleaving: explore all orders in which ranks load between exchanges; else one (loading commutes).
        kinds, most: a window holds any numbers of batches of each kind, so many in all.
    """

    def __init__(self, windows, *, extra=0, every_interleaving=True, kinds=1, most=MOST_BATCHES):
        self.every_interleaving = every_interleaving
        self.size = len(windows)
        self.seen = set()
        none = (0,) * kinds
        contents = product(range(most + 1), repeat=kinds)
        self.contents = [counts for counts in contents if 0 < sum(counts) <= most]
        ranks = tuple((none, of_rank, none, LOADING) for of_rank in windows)
        self.start = (ranks, extra, none, False)

    def agree(self, highest):
        return agree(highest)

    def explore(self):
        stack = [self.start]
        self.seen.add(self.start)
        while stack:
            state = stack.pop()
            following = list(self.following(state))
            assert following, f"deadlock in {state}"
            new = set(following) - self.seen - {None}
            self.seen |= new
            stack += new

    def following(self, state):
        ranks, *rest = state
        if all(place == WAITING for *_, place in ranks):
            yield self.exchange(ranks, *rest)
            return
        for number, rank in enumerate(ranks):
            if rank[3] == WAITING:
                continue
            for moved in self.load(rank):
                after = (*ranks[:number], moved, *ranks[number + 1 :])
                yield after, *rest
            if not self.every_interleaving:
                return

    def load(self, rank):
        queued, windows, made, _ = rank
        if windows == 0 or sum(queued) >= LOW_WATER:
            yield queued, windows, made, WAITING
            return
        for counts in self.contents:
            yield added(queued, counts), windows - 1, added(made, counts), LOADING

    def exchange(self, ranks, extra, taken, forced):
        queues = [queued for queued, *_ in ranks]
        receiving = [windows > 0 or extra > 0 for _, windows, *_ in ranks]
        agreement = self.agree(by_kind(max, map(offer, queues, receiving)))
        open_queues = [queue for queue, receives in zip(queues, receiving, strict=True) if receives]
        common = by_kind(min, open_queues)
        self.check_steps(queues, common, agreement)
        taken = added(taken, agreement.steps)
        if agreement.last:
            self.check_end(ranks, agreement, taken, forced)
            return None
        after = self.ranks_after(ranks, agreement.steps)
        grants = self.grants(after, extra)
        granted = tuple(
            (queued, windows + grant, made, place)
            for (queued, windows, made, place), grant in zip(after, grants, strict=True)
        )
        return granted, extra - sum(grants), taken, forced or not any(common)

    def ranks_after(self, ranks, steps):
        after = []
        for queued, windows, made, _ in ranks:
            pairs = zip(queued, steps, strict=True)
            left = tuple(max(0, count - taken) for count, taken in pairs)
            after.append((left, windows, made, LOADING))
        return after

    def check_steps(self, queues, common, agreement):
        for queue in queues:
            assert sum(queue) < LOW_WATER + MOST_BATCHES, "what waits is bounded"
        if not agreement.last and any(common):
            message = "a rank that still receives never idles in a kind that all of them have"
            assert agreement.steps == common, message
        assert sum(agreement.steps) > 0 or agreement.last, "an exchange brings the end nearer"
        longest = by_kind(max, queues)
        assert all(map(le, agreement.steps, longest)), "some rank has a batch"

    def grants(self, ranks, extra):
        """One window is one sample for ``hand_out``; loads are the windows and batches that a rank holds."""
        if extra == 0:
            return [0] * self.size
        loads = [sum(queued) + windows for queued, windows, *_ in ranks]
        windows_of_ranks, _ = hand_out(loads, 0, extra, window=1, target=LOW_WATER)
        return [sum(stop - start for start, stop in windows) for windows in windows_of_ranks]

    def check_end(self, ranks, agreement, taken, forced):
        windows_left = [windows for _, windows, *_ in ranks]
        assert not any(windows_left), "nothing that was handed out is left"
        for kind, num_steps in enumerate(agreement.steps):
            longest = max(queued[kind] for queued, *_ in ranks)
            assert longest <= num_steps, "nothing that was made is left"
            made = [made[kind] for *_, made, _ in ranks]
            most = sum(made) if forced else max(made)
            message = "as many steps as the rank with most batches needs, and no more"
            assert max(made) <= taken[kind] <= most, message


SIZES = [(1, 1, 5), (2, 1, 5), (3, 1, 5), (1, 2, 4), (2, 2, 4), (3, 2, 2)]


@pytest.mark.parametrize(("size", "kinds", "most"), SIZES)
def test_every_order_of_loading_ends_without_deadlock(size, kinds, most):
    """Of map-style data, whose rest is known, and of streams, whose end is found by asking.

    Loading touches a rank's own state only, so of three ranks one order stands for all, as is seen for two. Where no
    kind is on all ranks that receive, all of one kind is taken; else no rank idles before the end.
    """

    def explore(windows, extra):
        Explorer(
            windows,
            extra=extra,
            kinds=kinds,
            most=MOST_BATCHES // kinds,
            every_interleaving=size < 3,
        ).explore()

    for windows in combinations_with_replacement(range(most), size):
        explore(windows, extra=0)
    for extra in range(1, most):
        explore((1,) * size, extra=extra)


@pytest.mark.parametrize("kinds", [1, 2])
def test_an_epoch_is_finite(kinds):
    """Every exchange takes a step, or loads all, or ends: the longest path is bounded by windows and batches."""

    @cache
    def longest(state):
        paths = [longest(after) for after in explorer.following(state) if after is not None]
        return 1 + max(paths, default=0)

    for windows in product(range(4), repeat=2):
        explorer = Explorer(windows, kinds=kinds, most=MOST_BATCHES // kinds)
        bound = 2 * sum(windows) + MOST_BATCHES * max(windows) + 2
        assert longest(explorer.start) <= 2 + 3 * bound
        longest.cache_clear()


@pytest.mark.parametrize("num_batches", range(9))
def test_evening_out_over_all_queues(num_batches):
    """Of one to three samples each: conserved, as many parts as asked for or as there are samples."""
    for sizes in combinations_with_replacement((1, 2, 3), num_batches):
        for steps in range(num_batches, 14):
            parts = even_parts(sizes, steps)
            assert len(parts) == len(sizes)
            assert min(parts, default=1) >= 1
            assert all(map(le, parts, sizes))
            assert sum(parts) == max(num_batches, min(steps, sum(sizes)))


@pytest.mark.parametrize("target", [16, 32])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_handing_out_over_all_small_loads(size, target):
    """Every position is given once, in windows of at most 16.

    Ranks that are given any end at most a window above the lowest, at the end one sample.
    """
    for loads in product(range(0, 40, 8), repeat=size):
        for amount in range(0, 100, 9):
            windows_of_ranks, start = hand_out(loads, 0, amount, window=16, target=target)
            windows = sorted(chain.from_iterable(windows_of_ranks))
            positions = chain.from_iterable(range(*window) for window in windows)
            assert list(positions) == list(range(start))
            assert all(0 < stop - first <= 16 for first, stop in windows)
            grants = [sum(stop - first for first, stop in own) for own in windows_of_ranks]
            raised = added(loads, grants)
            assert start == amount or min(raised) >= target
            tops = [top for top, grant in zip(raised, grants, strict=True) if grant > 0]
            is_within_windows = start < amount or amount > 16 * size
            most_above = 16 if is_within_windows else 1
            assert max(tops, default=0) - min(raised) <= most_above


class Greedy(Explorer):
    """Breaks the protocol: takes the longest queue while others still receive."""

    def agree(self, highest):
        longest = highest[1 : len(highest) // 2]
        return Agreement(longest, agree(highest).last)


class Patient(Explorer):
    """Breaks the protocol: waits where no kind is on all ranks."""

    def agree(self, highest):
        agreement = agree(highest)
        if agreement.last or agreement.further == 0:
            return agreement
        return Agreement([0, 0])


def test_the_model_notices_a_rank_that_idles_too_early():
    with pytest.raises(AssertionError, match="never idles"):
        Greedy((2, 2)).explore()


def test_the_model_notices_a_wait_that_never_ends():
    with pytest.raises(AssertionError, match="nearer"):
        Patient((4, 4), kinds=2, most=1).explore()
