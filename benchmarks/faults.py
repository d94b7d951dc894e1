"""The fault campaign: random configurations meet faults; an oracle that knows nothing of the library judges what came.

    python -m benchmarks.faults --cases 1000          # prints counts; every violation with the seed that repeats it
    python -m benchmarks.faults --seed 417            # one case again

What is judged is read from the batches themselves: sample ``i`` is the token ``i`` repeated, so a batch shows which samples
it holds, and its loss is made up from them. Laws: every sample of an epoch once over all ranks and restarts; equally many
steps on all ranks; updates weighed as one process would; after a refused state the loader does what it would have done
without it; errors are the library's own (or the user's, where the user's code raised). A hang is a case that does not end in
ten minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch

from benchmarks.record import RESULTS, save
from dynagroup import OnlineDataLoader, PlannedDataLoader, StateError, TokenBudget, run_with_oom_retry
from dynagroup.errors import AlignmentError, BudgetError, ConfigError
from dynagroup.testing import run_ranks

__all__ = ["FAULTS", "Case", "main", "run_case"]

OURS = (AlignmentError, BudgetError, ConfigError, StateError)
HANG_S = 600.0


# -- data that shows what happened to it ------------------------------------------------------------------------------


class Numbered(torch.utils.data.Dataset):
    """Sample ``i`` is the token ``i``, as often as it is long. ``broken`` raises, ``deadly`` kills its worker."""

    def __init__(self, lengths: Sequence[int], *, broken: int | None = None, deadly: int | None = None) -> None:
        self.lengths, self.broken, self.deadly = list(lengths), broken, deadly

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == self.broken:
            raise KeyError(f"record {index} is broken")
        if index == self.deadly and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        ids = torch.full((self.lengths[index],), index, dtype=torch.int64)
        return {"input_ids": ids, "labels": ids.clone()}


def collate(samples: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([s["input_ids"] for s in samples], batch_first=True, padding_value=-1)
    return {"input_ids": ids, "labels": pad([s["labels"] for s in samples], batch_first=True, padding_value=-100)}


def value_of(sample: int) -> float:
    """The made-up loss of each token of a sample."""
    return math.sin(1.0 + sample)


@dataclass
class Seen:
    """One step as the training loop saw it."""

    samples: list[int]
    loss: float
    """Factor times the batch's mean loss over its predicted tokens."""
    ends: bool

    @classmethod
    def of(cls, step: Any) -> Seen:
        samples = [] if step.idle else step.batch["input_ids"][:, 0].tolist()
        counts = (step.batch["labels"][:, 1:] != -100).sum(dim=1).tolist() if not step.idle else []
        total = sum(counts)
        mean = sum(n * value_of(i) for n, i in zip(counts, samples, strict=True)) / total if total else 0.0
        return cls(samples, step.loss_scale * mean, step.ends_update)


# -- the oracle -------------------------------------------------------------------------------------------------------


def judged(lengths: Sequence[int], ranks: Sequence[Sequence[Seen]], expected: Counter[int]) -> list[str]:
    """What is wrong with the steps of all ranks, in words; empty if nothing."""
    wrong = []
    if len({len(steps) for steps in ranks}) > 1:
        return [f"unequal steps: {[len(steps) for steps in ranks]}"]
    found = Counter(i for steps in ranks for step in steps for i in step.samples)
    if lost := expected - found:
        wrong.append(f"{lost.total()} samples lost, such as {sorted(lost)[:5]}")
    if extra := found - expected:
        wrong.append(f"{extra.total()} samples repeated, such as {sorted(extra)[:5]}")
    for row in zip(*ranks, strict=True):
        if len({step.ends for step in row}) > 1:
            wrong.append("updates end at different steps")
            break
    return wrong + wrong_gradients(lengths, ranks)


def wrong_gradients(lengths: Sequence[int], ranks: Sequence[Sequence[Seen]]) -> list[str]:
    update: list[Seen] = []
    for row in zip(*ranks, strict=True):
        update += row
        if not row[0].ends:
            continue
        members = [i for step in update for i in step.samples]
        weight = sum(lengths[i] - 1 for i in members)
        wanted = sum((lengths[i] - 1) * value_of(i) for i in members) / weight if weight else 0.0
        found = sum(step.loss for step in update) / len(ranks)
        if abs(found - wanted) > 1e-9 * max(1.0, abs(wanted)):
            return [f"gradient of an update of {len(members)} samples is {found!r}, not {wanted!r}"]
        update = []
    return []


# -- cases ------------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A random configuration and a fault, from a seed alone."""

    seed: int
    fault: str = ""
    lengths: list[int] = field(default_factory=list)
    ranks: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    online: bool = False
    max_tokens: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        rng = self.rng
        self.fault = self.fault or rng.choice(sorted(FAULTS))
        draw = np.random.default_rng(self.seed)
        count = rng.choice([1, 3, 17, 60, 200])
        self.lengths = np.clip(draw.lognormal(2.0, rng.choice([0.2, 0.8, 1.3]), count), 1, 80).astype(int).tolist()
        self.max_tokens = rng.choice([80, 160, 640])
        self.ranks = rng.choice([1, 1, 2, 3, 4])
        self.online = rng.random() < 0.5
        self.options = {"seed": rng.randrange(5), "shuffle": rng.random() < 0.6}
        if rng.random() < 0.7:
            self.options["samples_per_update"] = rng.choice([4, 8, 32])
        else:
            self.options["accumulation"] = rng.choice([1, 3])
        if self.online:
            self.options["window"] = rng.choice([4, 16, 64])
            if rng.random() < 0.3:
                self.options["length_hint"] = self.lengths

    def loader(self, world: Any, dataset: Any = None, *, lengths: Sequence[int] | None = None, **more: Any) -> Any:
        data = dataset if dataset is not None else Numbered(self.lengths)
        budget = TokenBudget(self.max_tokens)
        options = {**self.options, "collate_fn": collate, "world": world, **more}
        if self.online:
            return OnlineDataLoader(data, budget, **options)
        for name in ("length_hint", "shuffle"):  # it knows the lengths, and always draws anew
            options.pop(name, None)
        return PlannedDataLoader(data, self.lengths if lengths is None else lengths, budget, **options)

    def everything(self, epochs: int = 1) -> Counter[int]:
        return Counter({i: epochs for i in range(len(self.lengths))})

    def other_ranks(self) -> int:
        return self.rng.choice([1, 2, 3, 5])


def epoch_of(loader: Any) -> list[Seen]:
    return [Seen.of(step) for step in loader]


def stop_and_resume(case: Case, *, ranks_after: int) -> list[str]:
    """An epoch stopped after a random step, saved as JSON, and continued on so many ranks by fresh loaders."""
    whole = run_ranks(case.ranks, lambda world: epoch_of(case.loader(world)))
    stop = case.rng.randint(0, len(whole[0]))
    if ranks_after != case.ranks and stop < len(whole[0]):
        while stop and not whole[0][stop - 1].ends:
            stop -= 1  # the gradient of an update that two numbers of ranks share is nobody's to judge

    def first_half(world: Any) -> tuple[list[Seen], Any]:
        loader = case.loader(world)
        steps = [Seen.of(step) for step in islice(loader, stop)] if stop else []
        return steps, json.loads(json.dumps(loader.state_dict()))

    begun = run_ranks(case.ranks, first_half)
    states = [state for _, state in begun]

    def second_half(world: Any) -> list[Seen]:
        loader = case.loader(world)
        loader.load_state_dict(states[world.rank] if ranks_after == case.ranks else states)
        return epoch_of(loader)

    rest = run_ranks(ranks_after, second_half)
    done = Counter(i for steps, _ in begun for step in steps for i in step.samples)
    if stop == len(whole[0]):  # the epoch was used up: the next one comes
        return judged(case.lengths, rest, case.everything())
    wrong = (
        []
        if ranks_after != case.ranks
        else wrong_gradients(case.lengths, [a + b for (a, _), b in zip(begun, rest, strict=True)])
    )
    remaining = case.everything() - done
    left = [
        fault for fault in judged(case.lengths, rest, remaining) if "gradient" not in fault or ranks_after != case.ranks
    ]
    return wrong + left


def stop_and_resume_alike(case: Case) -> list[str]:
    return stop_and_resume(case, ranks_after=case.ranks)


def stop_and_resume_elsewhere(case: Case) -> list[str]:
    return stop_and_resume(case, ranks_after=case.other_ranks())


def nothing_happens(case: Case) -> list[str]:
    """Three epochs."""

    def three(world: Any) -> list[list[Seen]]:
        loader = case.loader(world)
        return [epoch_of(loader) for _ in range(3)]

    epochs = zip(*run_ranks(case.ranks, three), strict=True)
    return [fault for ranks in epochs for fault in judged(case.lengths, ranks, case.everything())]


def breaks_and_iterates_again(case: Case) -> list[str]:
    """The loop is left early on all ranks; the next iteration is a whole epoch."""

    def again(world: Any) -> list[Seen]:
        loader = case.loader(world)
        for _ in islice(loader, 2):
            pass
        return epoch_of(loader)

    return judged(case.lengths, run_ranks(case.ranks, again), case.everything())


def item_raises(case: Case) -> list[str]:
    """The user's error reaches every rank; a loader of sound data then goes on."""
    broken = case.rng.randrange(len(case.lengths))
    data = Numbered(case.lengths, broken=broken)
    try:
        run_ranks(case.ranks, lambda world: epoch_of(case.loader(world, data)))
    except Exception as error:  # noqa: BLE001 - any, as long as it tells
        return [] if f"{broken}" in str(error) else [f"the error does not name the broken record: {error!r}"]
    return ["a broken record went unnoticed"]


def slow_rank(case: Case) -> list[str]:
    """One rank takes its time."""
    slow = case.rng.randrange(case.ranks)

    def run(world: Any) -> list[Seen]:
        steps = []
        for step in case.loader(world):
            steps.append(Seen.of(step))
            if world.rank == slow:
                time.sleep(0.001)
        return steps

    return judged(case.lengths, run_ranks(case.ranks, run), case.everything())


def lengths_lie(case: Case) -> list[str]:
    """Lengths (or hints) are wrong by up to ten times: every sample still comes once, weighed by the truth."""
    told = [max(1, int(n * case.rng.choice([0.1, 1, 10]))) for n in case.lengths]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if case.online:
            case.options["length_hint"] = told
            ranks = run_ranks(case.ranks, lambda world: epoch_of(case.loader(world)))
        else:
            ranks = run_ranks(case.ranks, lambda world: epoch_of(case.loader(world, lengths=told)))
    return judged(case.lengths, ranks, case.everything())


def mutated(rng: random.Random, value: Any) -> Any:
    """``value`` with one part of it damaged."""
    junk: list[Any] = [None, -1, 10**12, 2**80, 1.5, "", "x", [], {}, True, float("nan"), [[]], {"a": 1}]
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        if rng.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: mutated(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value[:place]
        return [*value[:place], mutated(rng, value[place]), *value[place + 1 :]]
    if isinstance(value, str) and value and rng.random() < 0.6:
        place = rng.randrange(len(value))
        return value[:place] + rng.choice("Aa0=é") + value[place + 1 :]
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.5:
        return value + rng.choice([-1, 1, 7, -1000, 10**9])
    return rng.choice(junk)


def damaged_state(case: Case) -> list[str]:
    """A damaged state is refused by StateError and changes nothing; or what it says is carried out whole."""
    case.ranks = 1
    loader = case.loader(None)
    for _ in islice(loader, case.rng.randint(0, 3)):
        pass
    state = json.loads(json.dumps(loader.state_dict()))
    wrong = []
    for _ in range(10):
        victim, twin = case.loader(None), case.loader(None)
        damaged = mutated(case.rng, state)
        try:
            victim.load_state_dict(damaged)
        except StateError:
            if epoch_of(victim) != epoch_of(twin):
                wrong.append("a refused state changed the loader")
            continue
        except Exception as error:  # noqa: BLE001 - that is the finding
            wrong.append(f"a damaged state ends in {type(error).__name__}: {error}"[:300])
            continue
        try:
            steps = list(islice(victim, 5000))
        except OURS:
            continue
        except Exception as error:  # noqa: BLE001 - that is the finding
            wrong.append(f"a damaged state was accepted and then ends in {type(error).__name__}: {error}"[:300])
            continue
        if len(steps) >= 5000:
            wrong.append("a damaged state was accepted and makes an endless epoch")
        elif max(Counter(i for step in steps for i in Seen.of(step).samples).values(), default=1) > 1:
            wrong.append("a damaged state was accepted and repeats samples")
    return wrong


def foreign_state(case: Case) -> list[str]:
    """A state of a run with other settings is refused, and changes nothing."""
    case.ranks = 1
    loader = case.loader(None)
    for _ in islice(loader, 1):
        pass
    state = json.loads(json.dumps(loader.state_dict()))
    changes: list[dict[str, Any]] = [{"seed": case.options["seed"] + 1}]
    if "samples_per_update" in case.options:
        changes += [{"samples_per_update": case.options["samples_per_update"] + 1}, {"drop_last": True}]
    else:
        changes += [{"accumulation": case.options["accumulation"] + 1}]
    if case.online:
        changes += [{"window": case.options["window"] + 1}]
    change = case.rng.choice(changes)
    stranger, twin = case.loader(None, **change), case.loader(None, **change)
    try:
        stranger.load_state_dict(state)
    except StateError as error:
        named = next(iter(change)) in str(error)
        same = epoch_of(stranger) == epoch_of(twin)
        return ([] if named else [f"the refusal does not name {change}: {error}"]) + (
            [] if same else ["it changed the loader"]
        )
    return [f"a state of another run was accepted: {change}"]


def out_of_memory_storm(case: Case) -> list[str]:
    """Every call may fail, whatever its size, but for single samples: results are complete and in order."""
    rng = random.Random(case.seed)

    def fragile(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        rows = batch["input_ids"]
        if len(rows) > 1 and rng.random() < 0.6:
            raise torch.OutOfMemoryError("CUDA out of memory (made up)")
        return rows[:, 0].clone()

    batch = collate([Numbered(case.lengths)[i] for i in range(min(len(case.lengths), 40))])
    parts = run_with_oom_retry(fragile, batch)
    found = torch.cat(list(parts)).tolist()
    return [] if found == list(range(len(found))) == list(range(len(batch["input_ids"]))) else [f"results are {found}"]


def worker_killed(case: Case) -> list[str]:
    """A worker process dies: an error on every rank, and no hang."""
    case.ranks = 1
    data = Numbered(case.lengths, deadly=case.rng.randrange(len(case.lengths)))
    try:
        epoch_of(case.loader(None, data, num_workers=1))
    except RuntimeError as error:
        return [] if "worker" in str(error).lower() else [f"the error does not speak of a worker: {error}"]
    return ["a killed worker went unnoticed"]


def workers_and_resume(case: Case) -> list[str]:
    """Real worker processes that prefetch; what was prefetched and not used comes again."""
    case.ranks = 1
    stop = case.rng.randint(1, 4)
    loader = case.loader(None, num_workers=2)
    begun = [Seen.of(step) for step in islice(loader, stop)]
    state = json.loads(json.dumps(loader.state_dict()))
    after = case.loader(None, num_workers=2)
    after.load_state_dict(state)
    rest = epoch_of(after)
    done = Counter(i for step in begun for i in step.samples)
    expected = case.everything() - done or case.everything()
    return [fault for fault in judged(case.lengths, [rest], expected) if "gradient" not in fault]


FAULTS: dict[str, Callable[[Case], list[str]]] = {
    "none": nothing_happens,
    "early break, iterated again": breaks_and_iterates_again,
    "item raises": item_raises,
    "slow rank": slow_rank,
    "stop and resume": stop_and_resume_alike,
    "stop and resume on other ranks": stop_and_resume_elsewhere,
    "lengths lie by ten times": lengths_lie,
    "state damaged": damaged_state,
    "state of another run": foreign_state,
    "out-of-memory storm": out_of_memory_storm,
    "worker killed": worker_killed,
    "workers prefetch, stop and resume": workers_and_resume,
}
RARE = ("worker killed", "workers prefetch, stop and resume")
"""They start processes, so a campaign has fewer of them."""


def run_case(case: Case) -> list[str]:
    """What the case found wrong; a hang is a finding, too."""
    found: list[list[str]] = []

    def run() -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found.append(FAULTS[case.fault](case))
        except (ConfigError, BudgetError) as error:
            asked = "samples_per_update" in str(error) or "at least the number of ranks" in str(error)
            found.append([] if asked else [f"{type(error).__name__}: {error}"])
        except Exception as error:  # noqa: BLE001 - that is the finding
            found.append([f"{type(error).__name__}: {error}"[:500]])

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANG_S)
    return found[0] if found else ["hang"]


def campaign(cases: int, first: int, show: Callable[[str], None] = print) -> dict[str, Any]:
    """Counts by fault, and the seeds of what was found."""
    counts: Counter[str] = Counter()
    findings: dict[int, list[str]] = {}
    plan = draws(first)
    for seed, fault in islice(plan, cases):
        wrong = run_case(Case(seed, fault))
        counts[fault] += 1
        if wrong:
            findings[seed] = [fault, *wrong]
            show(f"seed {seed}, {fault}: {'; '.join(wrong)}")
    return {"cases": cases, "first_seed": first, "by_fault": dict(sorted(counts.items())), "findings": findings}


def draws(first: int) -> Iterator[tuple[int, str]]:
    """Seeds with their faults, each fault in turn; the rare ones every tenth round."""
    seed, turn = first, 0
    while True:
        for fault in FAULTS:
            if fault not in RARE or turn % 10 == 0:
                yield seed, fault
                seed += 1
        turn += 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Print counts; 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="faults", description="Random configurations meet faults.")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("--seed", type=int, help="one case, by its seed (and --first of its campaign)")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/faults.json")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.seed is not None:
        fault = next(fault for seed, fault in draws(given.first) if seed == given.seed)
        case = Case(given.seed, fault)
        print(case)
        print(run_case(case) or "nothing wrong")
        return 0
    began = time.monotonic()
    found = campaign(given.cases, given.first)
    print(json.dumps({**found, "findings": len(found["findings"])}, indent=1))
    if given.save:
        print(save(RESULTS, "faults", {**found, "minutes": round((time.monotonic() - began) / 60, 1)}))
    return 1 if found["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
