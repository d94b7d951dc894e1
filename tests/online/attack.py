"""An attack on the online loader: random settings, stopped anywhere, resumed on any ranks, judged by what came out.

The oracle knows nothing of the library: it reads which samples the emitted batches really hold, and counts. An attack is a
function of one integer, so ``python -m tests.online.attack SEED`` repeats it.
"""

import json
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from dynagroup import OnlineDataLoader, TokenBudget
from dynagroup.testing import run_ranks
from tests.online.helpers import Jittered, Stream, Tokens, collate, ids_in

EPOCHS = 3


def shard(count: int, rank: int, size: int) -> range:
    """Rank 0 has most."""
    cuts = [0, *(count * (2**r - 1) // 2**r for r in range(1, size)), count]
    return range(cuts[rank], cuts[rank + 1])


class Shard(Stream):
    """One rank's part of a stream; ranks have differently many samples."""

    def own(self) -> range:
        return shard(len(self.lengths), self.rank, self.size)


class Drawn:
    """The user's order of these samples, or batches of it: other ones every epoch, of which only some come."""

    def __init__(self, samples: Any, *, shares: tuple[int, ...] = (3, 3, 3), batches: bool = False) -> None:
        self.samples, self.shares, self.batches, self.epoch = list(samples), shares, batches, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.samples) * self.shares[self.epoch % 3] // 3

    def __iter__(self) -> Iterator[Any]:
        drawn = random.Random(self.epoch).sample(self.samples, len(self))
        return (drawn[k : k + 4] for k in range(0, len(drawn), 4)) if self.batches else iter(drawn)


class Attack:
    """One random configuration."""

    def __init__(self, seed: int) -> None:
        r = self.random = random.Random(seed)
        self.seed, self.steps = seed, 0  # steps of the shortest whole epoch
        count = r.choice([1, 3, 17, 40, 40, 70])
        self.source = r.choice(["map", "map", "map", "jittered", "sampler", "batches", "stream"])
        divided = self.source in ("stream", "batches")
        self.lengths = [min(60, int(r.lognormvariate(2.2, 0.9)) + 1) for _ in range(count)]
        self.sizes = [r.choice([1, 2, 3, 4]) for _ in range(3)]
        if divided or r.random() < 0.4:
            self.sizes = [self.sizes[0]] * 3
        self.max_tokens = r.choice([30, 128, 400])
        self.options: dict[str, Any] = {"window": r.choice([1, 5, 16, 64]), "seed": r.choice([0, 9])}
        self.options["window_bytes"] = r.choice([1, 400, 4000, None])
        if self.source not in ("sampler", "stream", "batches"):
            self.options["shuffle"] = r.random() < 0.6
        if not divided and r.random() < 0.5:
            self.options["samples_per_update"] = r.choice([1, 4, 16, 100, lambda update, current: 3 + update % 5])
            self.options["drop_last"] = r.random() < 0.3
        else:
            self.options["accumulation"] = r.choice([1, 1, 3])
        if not divided and r.random() < 0.3:
            self.options["length_hint"] = [n * 1.5 for n in self.lengths]

    def __str__(self) -> str:
        return f"{self.source}, lengths {self.lengths}, {self.max_tokens} tokens, {self.options}"

    def drawn(self) -> Drawn:
        """All ranks' order: with updates of a set size of two thirds, else of a number that changes, of the samples."""
        return Drawn(range(len(self.lengths)), shares=(2, 2, 2) if "samples_per_update" in self.options else (1, 3, 2))

    def loader(self, world: Any) -> OnlineDataLoader:
        rank, size, count = world.rank, world.size, len(self.lengths)
        options = {"collate_fn": collate, "world": world, **self.options}
        if self.source == "sampler":
            options["sampler"] = self.drawn()
        if self.source == "batches":
            options["batch_sampler"] = Drawn(shard(count, rank, size), batches=True)
        kinds: dict[str, Any] = {"jittered": Jittered, "stream": lambda lengths: Shard(lengths, rank, size)}
        return OnlineDataLoader(kinds.get(self.source, Tokens)(self.lengths), TokenBudget(self.max_tokens), **options)

    def expected(self, epoch: int) -> Counter[int]:
        """How often each sample must come in an epoch."""
        if self.source != "sampler":
            return Counter(range(len(self.lengths)))
        drawn = self.drawn()
        drawn.set_epoch(epoch)
        return Counter(drawn)

    def stop(self, steps: int) -> int:
        """Where to stop in an epoch of so many steps."""
        return max(0, self.random.choice([0, 1, steps // 2, steps - 1, steps, self.random.randint(0, max(steps, 1))]))


def leg(attack: Attack, world: Any, states: Any, epoch: int | None, stop: int | None) -> Any:
    """Resume, go on until ``stop`` steps of an epoch came (all epochs, where it is None), and save.

    Returns:
        epoch -> steps; and the state.
    """
    loader, came = attack.loader(world), {}
    if states is not None:
        own = states if len(states) != world.size or attack.seed % 2 else states[world.rank]
        loader.load_state_dict(own)
    while loader.epoch < EPOCHS:
        now = loader.epoch
        here = now == epoch and stop is not None
        steps = came.setdefault(now, [])
        for step in islice(loader, stop if here else None):
            check_step(step, attack)
            steps.append(step)
        if here:
            break
    if states is not None and attack.source != "stream":  # a stream's end is found by asking only
        first = came[min(came)] if came else [None]
        assert first or stop == 0 or not attack.steps, "an epoch was resumed of which nothing was left"
    return came, json.loads(json.dumps(loader.state_dict()))


def check_step(step: Any, attack: Attack) -> None:
    ids = step.batch["input_ids"]
    assert step.idle or ids.numel() <= attack.max_tokens or len(ids) == 1, "a batch does not fit"
    assert step.samples.local == (0 if step.idle else len(ids))


def check_rows(by_rank: Any, accumulation: int | None = None) -> None:
    """Equal steps on all ranks, and updates with the same totals; of whole epochs, of as many steps as were asked for."""
    for epoch in by_rank[0]:
        ranks = [came[epoch] for came in by_rank]
        assert len({len(steps) for steps in ranks}) == 1, "ranks take different numbers of steps"
        for row in zip(*ranks, strict=True):
            assert len({step.ends_update for step in row}) == 1, "ranks end updates at different steps"
            assert len({step.weight.total for step in row}) == 1, "ranks know different totals"
        ends = [number for number, step in enumerate(ranks[0]) if step.ends_update]
        if accumulation is not None:
            assert not ranks[0] or ends[-1] == len(ranks[0]) - 1
            assert ends[:-1] == list(range(accumulation - 1, len(ranks[0]) - 1, accumulation)), "an update is short"


def run(seed: int) -> None:
    """One attack: three legs, each saved anywhere in some epoch and resumed on other ranks; the last runs to the end."""
    attack = Attack(seed)
    whole = run_ranks(attack.sizes[0], lambda world: leg(attack, world, None, None, None)[0])
    check_rows(whole, attack.options.get("accumulation"))
    attack.steps = min(len(steps) for steps in whole[0].values())
    came: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(EPOCHS)}
    states, epoch, stops, taken = None, attack.random.randrange(EPOCHS), [], 0
    for number, size in enumerate(attack.sizes):
        last = number == len(attack.sizes) - 1
        stop = None if last else attack.stop(len(whole[0].get(epoch, ())) - taken)
        if stop == 0 and states is not None and len(states) != size:
            stop = 1  # resumed on other ranks, a state can be saved after a step
        stops.append((epoch, stop, size))
        done = run_ranks(size, lambda world, s=states, e=epoch, k=stop: leg(attack, world, s, e, k))
        check_rows([epochs for epochs, _ in done])
        for when, steps in chain.from_iterable(epochs.items() for epochs, _ in done):
            came[when].update(chain.from_iterable(ids_in(step) for step in steps))
        states = [state for _, state in done]
        taken += len(done[0][0].get(epoch, ())) if states[0]["epoch"] == epoch else -taken
        epoch = min(max(epoch, states[0]["epoch"]), EPOCHS - 1)
    for when in range(EPOCHS):
        judge(attack, when, came[when], f"{attack}, legs of (epoch, stop, ranks) {stops}")


def judge(attack: Attack, epoch: int, came: Counter[int], told: str) -> None:
    expected = attack.expected(epoch)
    extra, lost = came - expected, expected - came
    assert not extra, f"epoch {epoch}: {dict(extra)} came too often; {told}"
    per_update = attack.options.get("samples_per_update")
    most = (7 if callable(per_update) else per_update) if attack.options.get("drop_last") else 1
    assert lost.total() < most, f"epoch {epoch}: {dict(lost)} are lost; {told}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for number in range(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else int(sys.argv[1]) + 1):
        try:
            run(number)
        except Exception as error:  # noqa: BLE001 - an attack reports what it finds
            print(f"attack {number}: {type(error).__name__}: {error}")
