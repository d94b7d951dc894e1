"""An attack on the online loader: random settings, stopped anywhere, resumed on any ranks, judged by what came out.

The oracle knows nothing of the library: it reads which samples the emitted batches really hold, and counts. An attack is a
function of one integer, so ``python -m tests.online.attack SEED`` repeats it.
"""

from __future__ import annotations

import json
import random
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from dynagroup import OnlineDataLoader, TokenBudget
from dynagroup.testing import run_ranks
from tests.online.helpers import Jittered, Tokens, collate, ids_in

EPOCHS = 3


class Shard(IterableDataset):
    """One rank's part of a stream; ranks have differently many samples."""

    def __init__(self, lengths, rank, size):
        self.lengths, self.rank, self.size = lengths, rank, size

    def __iter__(self):
        for index in shard(len(self.lengths), self.rank, self.size):
            ids = torch.full((self.lengths[index],), index)
            yield {"input_ids": ids, "labels": ids.clone()}


def shard(count, rank, size):
    """Rank 0 has most."""
    cuts = [0, *(count * (2**r - 1) // 2**r for r in range(1, size)), count]
    return range(cuts[rank], cuts[rank + 1])


class Reseeded:
    """The user's order: other indices every epoch, some of them not at all, the same on every rank."""

    def __init__(self, count, seed):
        self.count, self.seed, self.epoch = count, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.count * 2 // 3

    def __iter__(self):
        return iter(random.Random(self.seed + self.epoch).sample(range(self.count), len(self)))


class OwnBatches:
    """The user's batches of one rank."""

    def __init__(self, count, rank, size):
        self.own, self.epoch = list(shard(count, rank, size)), 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        drawn = random.Random(self.epoch).sample(self.own, len(self.own))
        return (drawn[k : k + 4] for k in range(0, len(drawn), 4))


@dataclass
class Attack:
    """One random configuration."""

    seed: int
    lengths: list[int] = field(init=False)
    source: str = field(init=False)
    sizes: list[int] = field(init=False)
    options: dict[str, Any] = field(init=False)
    steps: int = field(init=False, default=0)
    """Steps of the shortest whole epoch."""

    def __post_init__(self):
        r = self.random = random.Random(self.seed)
        count = r.choice([1, 3, 17, 40, 40, 70])
        self.source = r.choice(["map", "map", "map", "jittered", "sampler", "batches", "stream"])
        count = max(count, 17) if self.source == "stream" else count  # a rank of a stream needs something to idle on
        self.lengths = [min(60, int(r.lognormvariate(2.2, 0.9)) + 1) for _ in range(count)]
        self.sizes = [r.choice([1, 2, 3, 4]) for _ in range(3)]
        if self.source in ("stream", "batches") or r.random() < 0.4:
            self.sizes = [self.sizes[0]] * 3
        self.max_tokens = r.choice([30, 128, 400])
        self.options = {"window": r.choice([1, 5, 16, 64]), "seed": r.choice([0, 9])}
        self.options["window_bytes"] = r.choice([1, 400, 4000, None])
        if self.source not in ("sampler", "stream", "batches"):
            self.options["shuffle"] = r.random() < 0.6
        if self.source not in ("stream", "batches") and r.random() < 0.5:
            self.options["samples_per_update"] = r.choice([1, 4, 16, 100, lambda update, current: 3 + update % 5])
            self.options["drop_last"] = r.random() < 0.3
        else:
            self.options["accumulation"] = r.choice([1, 1, 3])
        if self.source not in ("stream", "batches") and r.random() < 0.3:
            self.options["length_hint"] = [n * 1.5 for n in self.lengths]

    def loader(self, world):
        rank, size, count = world.rank, world.size, len(self.lengths)
        options = {"collate_fn": collate, "world": world, **self.options}
        if self.source == "sampler":
            options["sampler"] = Reseeded(count, self.seed)
        if self.source == "batches":
            options["batch_sampler"] = OwnBatches(count, rank, size)
        kinds = {"jittered": Jittered, "stream": lambda lengths: Shard(lengths, rank, size)}
        return OnlineDataLoader(kinds.get(self.source, Tokens)(self.lengths), TokenBudget(self.max_tokens), **options)

    def expected(self, epoch):
        """How often each sample must come in an epoch, and how many of them may be missing."""
        count = len(self.lengths)
        if self.source == "sampler":
            sampler = Reseeded(count, self.seed)
            sampler.set_epoch(epoch)
            return Counter(sampler)
        return Counter(range(count))

    def stop(self, steps):
        """Where to stop in an epoch of so many steps."""
        return max(0, self.random.choice([0, 1, steps // 2, steps - 1, steps, self.random.randint(0, max(steps, 1))]))


def leg(attack, world, states, epoch, stop):
    """Resume, go on until ``stop`` steps of an epoch came (all epochs, where it is None), and save.

    Returns:
        epoch -> steps: each the ids it holds; and the state.
    """
    loader, came = attack.loader(world), {}
    if states is not None:
        own = states if len(states) != world.size or attack.seed % 2 else states[world.rank]
        loader.load_state_dict(own)
    while loader.epoch < EPOCHS:
        now = loader.epoch
        steps = came.setdefault(now, [])
        items = iter(loader)
        for step in islice(items, stop if now == epoch and stop is not None else None):
            check_step(step, attack)
            steps.append((ids_in(step), step.ends_update, step.weight, step.loss_scale, step.idle))
        if now == epoch and stop is not None:
            break
    if states is not None and attack.source != "stream":  # a stream's end is found by asking only
        first = came[min(came)] if came else [None]
        assert first or stop == 0 or not attack.steps, "an epoch was resumed of which nothing was left"
    return came, json.loads(json.dumps(loader.state_dict()))


def check_step(step, attack):
    ids = step.batch["input_ids"]
    assert step.idle or ids.numel() <= attack.max_tokens or len(ids) == 1, "a batch does not fit"
    assert step.idle == (step.samples.local == 0)
    assert step.samples.local == (0 if step.idle else len(ids))


def check_rows(by_rank):
    """Equal steps on all ranks, and updates whose totals are what their steps add up to."""
    for epoch in by_rank[0]:
        ranks = [came[epoch] for came in by_rank]
        assert len({len(steps) for steps in ranks}) == 1, "ranks take different numbers of steps"
        for row in zip(*ranks, strict=True):
            assert len({ends for _, ends, *_ in row}) == 1, "ranks end updates at different steps"
            assert len({weight.total for _, _, weight, *_ in row}) == 1, "ranks know different totals"


def check_accumulation(by_rank, accumulation):
    """Every update of an epoch has as many steps as were asked for; only the last may have fewer."""
    for steps in by_rank[0].values():
        ends = [number for number, (_, ends, *_) in enumerate(steps) if ends]
        assert not steps or ends[-1] == len(steps) - 1
        assert ends[:-1] == list(range(accumulation - 1, len(steps) - 1, accumulation)), "an update is short"


def run(seed):
    """One attack: three legs, each saved anywhere in some epoch and resumed on other ranks; the last runs to the end."""
    attack = Attack(seed)
    whole = run_ranks(attack.sizes[0], lambda world: leg(attack, world, None, None, None)[0])
    check_rows(whole)
    if "accumulation" in attack.options:
        check_accumulation(whole, attack.options["accumulation"])
    attack.steps = min(len(steps) for steps in whole[0].values())
    came: dict[int, Counter[int]] = {}
    states, epoch, stops, taken = None, attack.random.randrange(EPOCHS), [], 0
    for number, size in enumerate(attack.sizes):
        last = number == len(attack.sizes) - 1
        stop = None if last else attack.stop(len(whole[0].get(epoch, ())) - taken)
        if stop == 0 and states is not None and len(states) != size:
            stop = 1  # resumed on other ranks, a state can be saved after a step
        stops.append((epoch, stop, size))
        done = run_ranks(size, lambda world, s=states, e=epoch, k=stop: leg(attack, world, s, e, k))
        check_rows([epochs for epochs, _ in done])
        for epochs, _ in done:
            for when, steps in epochs.items():
                came.setdefault(when, Counter()).update(chain.from_iterable(ids for ids, *_ in steps))
        states = [state for _, state in done]
        taken += len(done[0][0].get(epoch, ())) if states[0]["epoch"] == epoch else -taken
        epoch = min(max(epoch, states[0]["epoch"]), EPOCHS - 1)
    for when in range(EPOCHS):
        judge(attack, when, came.get(when, Counter()), f"{attack}, legs of (epoch, stop, ranks) {stops}")
    return states


def judge(attack, epoch, came, told):
    expected = attack.expected(epoch)
    extra, lost = came - expected, expected - came
    assert not extra, f"epoch {epoch}: {dict(extra)} came too often; {told}"
    if attack.options.get("drop_last"):
        per_update = attack.options["samples_per_update"]
        most = 7 if callable(per_update) else per_update
        assert lost.total() < most, f"epoch {epoch}: {lost.total()} samples are lost; {told}"
    else:
        assert not lost, f"epoch {epoch}: {dict(lost)} are lost; {told}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for number in range(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else int(sys.argv[1]) + 1):
        try:
            run(number)
        except Exception as error:  # noqa: BLE001 - an attack reports what it finds
            print(f"attack {number}: {type(error).__name__}: {error}")
