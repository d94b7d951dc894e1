"""The alignment protocol as an explicit-state model, explored exhaustively with the loader's own decision functions.

A rank is (queued batches, windows handed out, batches made so far, where it stands). What a window holds is unknown until it is
taken, so taking one branches into every number of batches. Ranks interleave freely between exchanges. How batches are
split at the end depends on their sizes only; that part is explored over all multisets of sizes.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations_with_replacement, product

import pytest

from dynagroup.online.protocol import Offer, agree, even_parts, hand_out, level

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

    def __init__(self, windows, *, extra=0, uneven="idle", streams=False, every_interleaving=True):
        self.uneven, self.streams, self.every = uneven, streams, every_interleaving
        self.size = len(windows)
        self.seen = set()
        self.ends = []
        self.edges = 0
        self.start = (tuple((0, w, 0, LOADING) for w in windows), extra, False)

    def explore(self):
        stack = [(self.start, 0)]
        self.seen.add(self.start)
        while stack:
            state, depth = stack.pop()
            following = list(self.following(state))
            if not following:
                raise AssertionError(f"deadlock in {state}")
            for after in following:
                self.edges += 1
                if after is None:
                    continue
                if after not in self.seen:
                    self.seen.add(after)
                    stack.append((after, depth + 1))
        return self

    def following(self, state):
        ranks, extra, load_all = state
        if all(place == WAITING for *_, place in ranks):
            yield self.exchange(ranks, extra)
            return
        for number, rank in enumerate(ranks):
            if rank[3] == LOADING:
                for moved in self.load(rank, load_all):
                    yield (*ranks[:number], moved, *ranks[number + 1 :]), extra, load_all
                if not self.every:
                    return

    def load(self, rank, load_all):
        queued, windows, made, _ = rank
        if windows and (load_all or queued < LOW_WATER):
            for batches in range(1, MOST_BATCHES + 1):
                yield queued + batches, windows - 1, made + batches, LOADING
        else:
            yield queued, windows, made, WAITING

    def exchange(self, ranks, extra):
        receiving = [bool(w) or (extra > 0) for _, w, _, _ in ranks]
        offers = [Offer(q, r, bounded=not self.streams).to_max() for (q, *_), r in zip(ranks, receiving, strict=True)]
        agreement = agree([max(column) for column in zip(*offers, strict=True)], self.uneven)
        assert agreement.steps >= 0
        for (queued, *_), receives in zip(ranks, receiving, strict=True):
            if receives and not agreement.last:
                assert agreement.steps <= queued, "a rank that still receives windows never idles"
        assert agreement.steps or agreement.last or agreement.load_all, "an exchange brings the end nearer"
        after = []
        for queued, windows, made, _ in ranks:
            after.append((max(0, queued - agreement.steps), windows, made, LOADING))
        if agreement.last:
            self.check_end(ranks, agreement)
            return None
        shares = self.shares(after, extra)
        after = tuple((q, w + share, m, p) for (q, w, m, p), share in zip(after, shares, strict=True))
        return after, extra - sum(shares), agreement.load_all

    def shares(self, ranks, extra):
        """One window is one sample for ``hand_out``; loads are the windows and batches that a rank holds."""
        if not extra:
            return [0] * self.size
        grants, _ = hand_out([q + w for q, w, *_ in ranks], 0, extra, window=1, target=LOW_WATER)
        return [sum(stop - start for start, stop in windows) for windows in grants]

    def check_end(self, ranks, agreement):
        assert not any(windows for _, windows, *_ in ranks), "nothing that was handed out is left"
        most = max(queued for queued, *_ in ranks)
        if self.uneven == "idle":
            assert agreement.steps == most, "as many steps as the rank with most batches needs, and no more"
        self.ends.append(agreement.steps)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("uneven", ["idle", "stop"])
def test_every_interleaving_ends_without_deadlock(size, uneven, record_property, capsys):
    states = edges = 0
    for windows in product(range(5), repeat=size):
        found = (
            StepCounting(windows, uneven=uneven).explore()
            if uneven == "idle"
            else Stopping(windows, uneven=uneven).explore()
        )
        states, edges = states + len(found.seen), edges + found.edges
    with capsys.disabled():
        print(
            f"\n[{size} ranks, uneven={uneven}: {states:,} states, {edges:,} transitions, every interleaving]", end=""
        )


class Stopping(Explorer):
    """uneven="stop": the epoch may end with windows left."""

    def check_end(self, ranks, agreement):
        assert agreement.steps == min(queued for queued, *_ in ranks)
        self.ends.append(agreement.steps)


class StepCounting(Explorer):
    """Compares the steps of the whole epoch with the batches of every rank."""

    def check_end(self, ranks, agreement):
        super().check_end(ranks, agreement)
        (before,) = {made - queued for queued, _, made, _ in ranks}
        assert before + agreement.steps == max(made for *_, made, _ in ranks)

    def exchange(self, ranks, extra):
        result = super().exchange(ranks, extra)
        if result is None:
            return None
        after, left, load_all = result
        taken = {q - a[0] for (q, *_), a in zip(ranks, after, strict=True)}
        assert len(taken) == 1, "all ranks take equally many steps, each from its own queue, until the end"
        return result


def test_three_ranks_where_loading_commutes(capsys):
    """Loading touches a rank's own state only, so one order of loading stands for all (seen above for two ranks)."""
    states = edges = 0
    for windows in combinations_with_replacement(range(5), 3):
        found = StepCounting(windows, every_interleaving=False).explore()
        states, edges = states + len(found.seen), edges + found.edges
    with capsys.disabled():
        print(f"\n[3 ranks: {states:,} states, {edges:,} transitions]", end="")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_windows_handed_out_at_exchanges(size, capsys):
    states = edges = 0
    for extra in range(5):
        found = StepCounting((1,) * size, extra=extra, every_interleaving=size < 3).explore()
        states, edges = states + len(found.seen), edges + found.edges
    with capsys.disabled():
        print(f"\n[{size} ranks, windows handed out: {states:,} states, {edges:,} transitions]", end="")


class Streams(Explorer):
    """A stream's end is found by asking; a rank that has ended evens out, then idles."""

    def check_end(self, ranks, agreement):
        assert not any(windows for _, windows, *_ in ranks)


@pytest.mark.parametrize("size", [1, 2])
def test_streams_of_any_length_end_together(size, capsys):
    states = edges = 0
    for windows in product(range(5), repeat=size):
        found = Streams(windows, streams=True).explore()
        states, edges = states + len(found.seen), edges + found.edges
    with capsys.disabled():
        print(f"\n[{size} streams: {states:,} states, {edges:,} transitions]", end="")


def test_an_epoch_is_finite():
    """Every exchange takes a step, or loads all, or ends: the longest path is bounded by windows and batches."""

    @cache
    def longest(state):
        return 1 + max((longest(after) for after in explorer.following(state) if after is not None), default=0)

    for windows in product(range(4), repeat=2):
        explorer = StepCounting(windows)
        assert longest(explorer.start) <= 2 + 3 * (2 * sum(windows) + MOST_BATCHES * max(windows, default=0) + 2)
        longest.cache_clear()


def test_evening_out_over_all_queues(capsys):
    """Up to eight batches of one to three samples: conserved, as many parts as asked for or as there are samples."""
    count = 0
    for num_batches in range(9):
        for sizes in combinations_with_replacement((1, 2, 3), num_batches):
            for steps in range(num_batches, 14):
                parts = even_parts(sizes, steps)
                assert len(parts) == len(sizes)
                assert all(1 <= p <= s for p, s in zip(parts, sizes, strict=True))
                assert sum(parts) == max(num_batches, min(steps, sum(sizes)))
                count += 1
    with capsys.disabled():
        print(f"\n[{count:,} queues evened out]", end="")


def test_levelling_over_all_small_loads():
    for size in (1, 2, 3):
        for loads in product(range(5), repeat=size):
            for amount in range(8):
                shares = level(loads, amount)
                assert sum(shares) == amount
                assert min(shares) >= 0
                raised = [load + share for load, share in zip(loads, shares, strict=True)]
                given = [r for r, share in zip(raised, shares, strict=True) if share]
                assert not given or max(given) - min(raised) <= 1, "only the lowest are raised, to one level"


def test_the_model_notices_a_broken_rule(monkeypatch):
    """Break the protocol once: taking the longest queue while others still receive must be seen."""
    import sys

    module = sys.modules[Explorer.__module__]
    whole = agree

    def greedy(highest, uneven="idle"):
        agreement = whole(highest, uneven)
        return type(agreement)(highest[0], agreement.last, agreement.load_all)

    monkeypatch.setattr(module, "agree", greedy)
    with pytest.raises(AssertionError, match="never idles"):
        StepCounting((2, 2)).explore()


@pytest.mark.parametrize("options", [{}, {"samples_per_update": 8}], ids=["free-running", "updates"])
def test_both_runners_take_the_steps_that_were_agreed(monkeypatch, options):
    """Agree to one step more at an end, of the epoch or of an update: each has one more, whoever counts them."""
    from dataclasses import replace

    from dynagroup.online import engine
    from tests.online.helpers import make_loader

    def longer(highest, uneven="idle"):
        agreement = agree(highest, uneven)
        return replace(agreement, steps=agreement.steps + 1) if agreement.last else agreement

    def steps():
        return len(list(make_loader(None, [4] * 16, **options)))

    usual = steps()
    monkeypatch.setattr(engine, "agree", longer)
    assert steps() == usual + (2 if options else 1)
