"""The alignment protocol as an explicit-state model, explored exhaustively with the loader's own decision functions.

A rank is (queued batches, windows handed out, batches made so far, where it stands). What a window holds is unknown until it is
taken, so taking one branches into every number of batches. Ranks interleave freely between exchanges. How batches are
split at the end depends on their sizes only; that part is explored over all multisets of sizes.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations_with_replacement, product

import pytest

from dynagroup.online.protocol import agree, even_parts, hand_out, offer

LOADING, WAITING = 0, 1
MOST_BATCHES = 4
LOW_WATER = 3


class Explorer:
    """All states that ranks can reach; the laws are checked in every one of them.

    Args:
        windows: windows that each rank was handed out when the exploration starts.
        extra: windows not handed out yet; each exchange gives them to the ranks with the smallest loads.
        every_interleaving: explore all orders in which ranks load between exchanges; else one (loading commutes).
    """

    def __init__(self, windows, *, extra=0, every_interleaving=True):
        self.every = every_interleaving
        self.size = len(windows)
        self.seen = set()
        self.start = (tuple((0, w, 0, LOADING) for w in windows), extra)

    @classmethod
    def explored(cls, starts, capsys, name, **how):
        """All of these, counted."""
        found = [cls(windows, **how).explore() for windows in starts]
        with capsys.disabled():
            print(f"\n[{name}: {sum(len(one.seen) for one in found):,} states]", end="")

    def explore(self):
        stack = [(self.start, 0)]
        self.seen.add(self.start)
        while stack:
            state, depth = stack.pop()
            following = list(self.following(state))
            if not following:
                raise AssertionError(f"deadlock in {state}")
            for after in following:
                if after is None:
                    continue
                if after not in self.seen:
                    self.seen.add(after)
                    stack.append((after, depth + 1))
        return self

    def following(self, state):
        ranks, extra = state
        if all(place == WAITING for *_, place in ranks):
            yield self.exchange(ranks, extra)
            return
        for number, rank in enumerate(ranks):
            if rank[3] == LOADING:
                for moved in self.load(rank):
                    yield (*ranks[:number], moved, *ranks[number + 1 :]), extra
                if not self.every:
                    return

    def load(self, rank):
        queued, windows, made, _ = rank
        if windows and queued < LOW_WATER:
            for batches in range(1, MOST_BATCHES + 1):
                yield queued + batches, windows - 1, made + batches, LOADING
        else:
            yield queued, windows, made, WAITING

    def exchange(self, ranks, extra):
        receiving = [bool(w) or (extra > 0) for _, w, _, _ in ranks]
        offers = [offer(queued, receives) for (queued, *_), receives in zip(ranks, receiving, strict=True)]
        agreement = agree([max(column) for column in zip(*offers, strict=True)])
        assert agreement.steps >= 0
        for (queued, *_), receives in zip(ranks, receiving, strict=True):
            if receives and not agreement.last:
                assert agreement.steps <= queued, "a rank that still receives windows never idles"
        assert agreement.steps or agreement.last, "an exchange brings the end nearer"
        after = []
        for queued, windows, made, _ in ranks:
            after.append((max(0, queued - agreement.steps), windows, made, LOADING))
        if agreement.last:
            self.check_end(ranks, agreement)
            return None
        shares = self.shares(after, extra)
        after = tuple((q, w + share, m, p) for (q, w, m, p), share in zip(after, shares, strict=True))
        return after, extra - sum(shares)

    def shares(self, ranks, extra):
        """One window is one sample for ``hand_out``; loads are the windows and batches that a rank holds."""
        if not extra:
            return [0] * self.size
        grants, _ = hand_out([q + w for q, w, *_ in ranks], 0, extra, window=1, target=LOW_WATER)
        return [sum(stop - start for start, stop in windows) for windows in grants]

    def check_end(self, ranks, agreement):
        assert not any(windows for _, windows, *_ in ranks), "nothing that was handed out is left"
        taken = max(made - queued for queued, _, made, _ in ranks)
        most = max(made for *_, made, _ in ranks)
        assert taken + agreement.steps == most, "as many steps as the rank with most batches needs, and no more"


@pytest.mark.parametrize("size", [1, 2])
def test_every_interleaving_ends_without_deadlock(size, capsys):
    """Of map-style data, whose rest is known, and of streams, whose end is found by asking: the rules are the same."""
    Explorer.explored(product(range(5), repeat=size), capsys, f"{size} ranks, every interleaving")


def test_three_ranks_where_loading_commutes(capsys):
    """Loading touches a rank's own state only, so one order of loading stands for all (seen above for two ranks)."""
    Explorer.explored(combinations_with_replacement(range(5), 3), capsys, "3 ranks", every_interleaving=False)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_windows_handed_out_at_exchanges(size, capsys):
    for extra in range(5):
        name = f"{size} ranks, {extra} windows handed out"
        Explorer.explored([(1,) * size], capsys, name, extra=extra, every_interleaving=size < 3)


def test_an_epoch_is_finite():
    """Every exchange takes a step, or loads all, or ends: the longest path is bounded by windows and batches."""

    @cache
    def longest(state):
        return 1 + max((longest(after) for after in explorer.following(state) if after is not None), default=0)

    for windows in product(range(4), repeat=2):
        explorer = Explorer(windows)
        assert longest(explorer.start) <= 2 + 3 * (2 * sum(windows) + MOST_BATCHES * max(windows, default=0) + 2)
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
    """Every position is given once; ranks that are given any end at most a window above the lowest, or an eighth at the end."""
    for loads in (loads for size in (1, 2, 3) for loads in product(range(0, 40, 8), repeat=size)):
        for amount, target in product(range(0, 100, 9), (16, 32)):
            grants, start = hand_out(loads, 0, amount, window=16, target=target)
            given = sorted(window for windows in grants for window in windows)
            assert [position for window in given for position in range(*window)] == list(range(start))
            assert all(0 < stop - first <= 16 for first, stop in given)
            sums = [sum(stop - first for first, stop in windows) for windows in grants]
            raised = [load + more for load, more in zip(loads, sums, strict=True)]
            assert start == amount or min(raised) >= target
            tops = [top for top, more in zip(raised, sums, strict=True) if more]
            assert not tops or max(tops) - min(raised) <= (16 if start < amount or amount > 16 * len(loads) else 2)


def test_the_model_notices_a_broken_rule(monkeypatch):
    """Break the protocol once: taking the longest queue while others still receive must be seen."""
    import sys

    module = sys.modules[Explorer.__module__]
    whole = agree

    def greedy(highest):
        return type(whole(highest))(highest[0], whole(highest).last)

    monkeypatch.setattr(module, "agree", greedy)
    with pytest.raises(AssertionError, match="never idles"):
        Explorer((2, 2)).explore()
