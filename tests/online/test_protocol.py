"""The alignment protocol as an explicit-state model, explored exhaustively with the loader's own decision functions.

A rank is (queued batches, windows handed out, batches made so far, where it stands), batches by kind. What a window holds is
unknown until it is taken, so taking one branches into every number of batches. Ranks interleave freely between exchanges. How
batches are split at the end depends on their sizes only; that part is explored over all multisets of sizes.
"""

from functools import cache
from itertools import combinations_with_replacement, product
from operator import add

import pytest

from dynagroup.online.protocol import agree, even_parts, hand_out, offer

LOADING, WAITING = 0, 1
MOST_BATCHES, LOW_WATER = 4, 3


class Explorer:
    """All states that ranks can reach; the laws are checked in every one of them.

    Args:
        windows: windows that each rank was handed out when the exploration starts.
        extra: windows not handed out yet; each exchange gives them to the ranks with the smallest loads.
        every_interleaving: explore all orders in which ranks load between exchanges; else one (loading commutes).
        kinds, most: a window holds any numbers of batches of each kind, so many in all.
    """

    def __init__(self, windows, *, extra=0, every_interleaving=True, kinds=1, most=MOST_BATCHES):
        self.every = every_interleaving
        self.size = len(windows)
        self.seen = set()
        none = (0,) * kinds
        self.contents = [
            counts for counts in product(range(most + 1), repeat=kinds) if 0 < sum(counts) <= most
        ]
        self.start = tuple((none, w, none, LOADING) for w in windows), extra, none, False

    def explore(self):
        stack = [self.start]
        self.seen.add(self.start)
        while stack:
            state = stack.pop()
            following = list(self.following(state))
            assert following, f"deadlock in {state}"
            new = {after for after in following if after is not None} - self.seen
            self.seen |= new
            stack += new

    def following(self, state):
        ranks, *rest = state
        if all(place == WAITING for *_, place in ranks):
            yield self.exchange(ranks, *rest)
            return
        for number, rank in enumerate(ranks):
            if rank[3] == LOADING:
                for moved in self.load(rank):
                    yield (*ranks[:number], moved, *ranks[number + 1 :]), *rest
                if not self.every:
                    return

    def load(self, rank):
        queued, windows, made, _ = rank
        if windows and sum(queued) < LOW_WATER:
            for counts in self.contents:
                yield added(queued, counts), windows - 1, added(made, counts), LOADING
        else:
            yield queued, windows, made, WAITING

    def exchange(self, ranks, extra, taken, forced):
        receiving = [bool(w) or (extra > 0) for _, w, _, _ in ranks]
        offers = [
            offer(queued, receives) for (queued, *_), receives in zip(ranks, receiving, strict=True)
        ]
        agreement = agree([max(column) for column in zip(*offers, strict=True)])
        open_queues = [
            queued for (queued, *_), receives in zip(ranks, receiving, strict=True) if receives
        ]
        common = [min(counts) for counts in zip(*open_queues, strict=True)]
        assert all(sum(queued) < LOW_WATER + MOST_BATCHES for queued, *_ in ranks), (
            "what waits is bounded"
        )
        if not agreement.last and any(common):
            assert agreement.steps == common, (
                "a rank that still receives never idles in a kind that all of them have"
            )
        assert sum(agreement.steps) or agreement.last, "an exchange brings the end nearer"
        held = [max(counts) for counts in zip(*(queued for queued, *_ in ranks), strict=True)]
        assert all(step <= most for step, most in zip(agreement.steps, held, strict=True)), (
            "some rank has a batch"
        )
        taken = added(taken, agreement.steps)
        if agreement.last:
            self.check_end(ranks, agreement, taken, forced)
            return None
        after = []
        for queued, windows, made, _ in ranks:
            left = tuple(max(0, q - step) for q, step in zip(queued, agreement.steps, strict=True))
            after.append((left, windows, made, LOADING))
        shares = self.shares(after, extra)
        after = tuple(
            (q, w + share, m, p) for (q, w, m, p), share in zip(after, shares, strict=True)
        )
        return after, extra - sum(shares), taken, forced or not any(common)

    def shares(self, ranks, extra):
        """One window is one sample for ``hand_out``; loads are the windows and batches that a rank holds."""
        if not extra:
            return [0] * self.size
        grants, _ = hand_out(
            [sum(q) + w for q, w, *_ in ranks], 0, extra, window=1, target=LOW_WATER
        )
        return [sum(stop - start for start, stop in windows) for windows in grants]

    def check_end(self, ranks, agreement, taken, forced):
        assert not any(windows for _, windows, *_ in ranks), "nothing that was handed out is left"
        for kind, (steps, count) in enumerate(zip(agreement.steps, taken, strict=True)):
            assert all(queued[kind] <= steps for queued, *_ in ranks), (
                "nothing that was made is left"
            )
            made = [made[kind] for *_, made, _ in ranks]
            most = sum(made) if forced else max(made)
            assert max(made) <= count <= most, (
                "as many steps as the rank with most batches needs, and no more"
            )


def added(counts, others):
    return tuple(map(add, counts, others))


@pytest.mark.parametrize(
    ("size", "kinds", "most"), [(1, 1, 5), (2, 1, 5), (3, 1, 5), (1, 2, 4), (2, 2, 4), (3, 2, 2)]
)
def test_every_order_of_loading_ends_without_deadlock(size, kinds, most):
    """Of map-style data, whose rest is known, and of streams, whose end is found by asking. Loading touches a rank's own
    state only, so of three ranks one order stands for all, as is seen for two. Where no kind is on all ranks that receive,
    all of one kind is taken; else no rank idles before the end."""
    how = {"kinds": kinds, "most": MOST_BATCHES // kinds, "every_interleaving": size < 3}
    for start in combinations_with_replacement(range(most), size):
        Explorer(start, **how).explore()
    for extra in range(1, most):
        Explorer((1,) * size, extra=extra, **how).explore()


def test_an_epoch_is_finite():
    """Every exchange takes a step, or loads all, or ends: the longest path is bounded by windows and batches."""

    @cache
    def longest(state):
        return 1 + max(
            (longest(after) for after in explorer.following(state) if after is not None), default=0
        )

    for windows, kinds in product(product(range(4), repeat=2), (1, 2)):
        explorer = Explorer(windows, kinds=kinds, most=MOST_BATCHES // kinds)
        assert longest(explorer.start) <= 2 + 3 * (
            2 * sum(windows) + MOST_BATCHES * max(windows, default=0) + 2
        )
        longest.cache_clear()


def test_evening_out_over_all_queues():
    """Up to eight batches of one to three samples: conserved, as many parts as asked for or as there are samples."""
    for num_batches in range(9):
        for sizes in combinations_with_replacement((1, 2, 3), num_batches):
            for steps in range(num_batches, 14):
                parts = even_parts(sizes, steps)
                assert len(parts) == len(sizes)
                assert all(1 <= p <= s for p, s in zip(parts, sizes, strict=True))
                assert sum(parts) == max(num_batches, min(steps, sum(sizes)))


def test_handing_out_over_all_small_loads():
    """Every position is given once; ranks that are given any end at most a window above the lowest, at the end one sample."""
    for loads in (loads for size in (1, 2, 3) for loads in product(range(0, 40, 8), repeat=size)):
        for amount, target in product(range(0, 100, 9), (16, 32)):
            grants, start = hand_out(loads, 0, amount, window=16, target=target)
            given = sorted(window for windows in grants for window in windows)
            assert [position for window in given for position in range(*window)] == list(
                range(start)
            )
            assert all(0 < stop - first <= 16 for first, stop in given)
            sums = [sum(stop - first for first, stop in windows) for windows in grants]
            raised = [load + more for load, more in zip(loads, sums, strict=True)]
            assert start == amount or min(raised) >= target
            tops = [top for top, more in zip(raised, sums, strict=True) if more]
            assert not tops or max(tops) - min(raised) <= (
                16 if start < amount or amount > 16 * len(loads) else 1
            )


def test_the_model_notices_a_broken_rule(monkeypatch):
    """Break the protocol: taking the longest queue while others still receive, and waiting where no kind is on all, are seen."""
    whole = agree

    def greedy(highest):
        return type(whole(highest))(highest[1 : len(highest) // 2], whole(highest).last)

    monkeypatch.setitem(globals(), "agree", greedy)
    with pytest.raises(AssertionError, match="never idles"):
        Explorer((2, 2)).explore()

    def patient(highest):
        found = whole(highest)
        return found if found.last or not found.further else type(found)([0, 0])

    monkeypatch.setitem(globals(), "agree", patient)
    with pytest.raises(AssertionError, match="nearer"):
        Explorer((4, 4), kinds=2, most=1).explore()
