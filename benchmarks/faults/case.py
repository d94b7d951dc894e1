"""A random configuration of a loader, from a seed alone."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import Numbered, collate
from benchmarks.faults.oracle import Ranks, Seen, judged, over_budget
from dynagroup import OnlineDataLoader, PlannedDataLoader, TokenBudget
from dynagroup.testing import run_ranks


def seen(loader: Iterable[Any], most: int | None = None) -> list[Seen]:
    """The steps of an epoch, or its first ones."""
    if most == 0:  # not even an iterator
        return []
    return [Seen.of(step) for step in islice(loader, most)]


def seen_in(steps: Iterable[Seen]) -> Counter[int]:
    """How often each sample came."""
    return Counter(chain.from_iterable(step.samples for step in steps))


class Case:
    """What is drawn: lengths, budget and its layout, ranks, the kind of loader and its options."""

    folder: Path
    """Its own while it runs."""

    def __init__(self, seed: int, fault: str) -> None:
        self.seed = seed
        self.fault = fault
        self.rng = random.Random(seed)
        rng = self.rng
        count = rng.choice([1, 3, 17, 60, 200])
        sigma = rng.choice([0.2, 0.8, 1.3])
        drawn = np.random.default_rng(seed).lognormal(2.0, sigma, count)
        self.lengths: list[int] = np.clip(drawn, 1, 80).astype(int).tolist()
        self.max_tokens = rng.choice([80, 160, 640])
        self.ranks = rng.choice([1, 1, 2, 3, 4])
        self.online = rng.random() < 0.5
        self.packed = rng.random() < 0.25
        self.options: dict[str, Any] = {"seed": rng.randrange(5), "shuffle": rng.random() < 0.6}
        if rng.random() < 0.7:
            self.options["samples_per_update"] = rng.choice([4, 8, 32])
        else:
            self.options["accumulation"] = rng.choice([1, 3])
        if self.online:
            self.options["window"] = rng.choice([4, 16, 64])
            if rng.random() < 0.3:
                self.options["length_hint"] = self.lengths

    def loader(
        self, world: Any, dataset: Any = None, *, lengths: Sequence[int] | None = None, **more: Any
    ) -> Any:
        """A new loader; ``lengths`` are what a planned one is told instead of the truth."""
        if dataset is None:
            dataset = Numbered(self.lengths)
        budget = TokenBudget(self.max_tokens, layout="packed" if self.packed else "padded")
        options = {**self.options, "collate_fn": collate, "world": world, **more}
        if self.online:
            return OnlineDataLoader(dataset, budget, **options)
        for name in ("length_hint", "shuffle"):  # it knows the lengths, and always draws anew
            options.pop(name, None)
        if lengths is None:
            lengths = self.lengths
        return PlannedDataLoader(dataset, lengths, budget, **options)

    def epoch(self, dataset: Any = None, **more: Any) -> list[list[Seen]]:
        """One epoch of a new loader on every rank."""
        return run_ranks(self.ranks, lambda world: seen(self.loader(world, dataset, **more)))

    @property
    def everything(self) -> Counter[int]:
        return Counter(range(len(self.lengths)))

    def other_ranks(self) -> int:
        return self.rng.choice([1, 2, 3, 5])

    def judged(self, ranks: Ranks, expected: Counter[int] | None = None) -> list[str]:
        """What is wrong with an epoch whose lengths were told truly; by default every sample should have come once."""
        if expected is None:
            expected = self.everything
        wrong = judged(self.lengths, ranks, expected)
        return wrong + over_budget(self.lengths, ranks, self.max_tokens, packed=self.packed)
