"""Planning: how fast, how little memory, and how costs grow; a peer in the same run."""

import re
import tempfile
import threading
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.data import lognormal
from benchmarks.loader import BUDGET, light_loader
from benchmarks.machine import Machine, on_ranks
from benchmarks.methods import dynabatch, planned
from benchmarks.record import spread
from dynagroup import Budget, LengthAwareBatchSampler, MemoryBudget, TokenBudget
from dynagroup.distributed import current_world
from dynagroup.plan.cursor import Cursor
from dynagroup.plan.inputs import PlanConfig
from dynagroup.plan.plan import BatchPlan
from dynagroup.plan.planner import Planner, UpdatePlans
from dynagroup.update.shared_plans import MOST_SAMPLES, columns_of, exchange_columns, unpacked

SAMPLES = (10_000, 100_000, 1_000_000, 10_000_000)
RANKS = (1, 8, 64, 512, 1024)
PACKED, CHUNK = TokenBudget(16_384, layout="packed"), 1_000_000
SCALES: dict[str, tuple[int, Budget, dict[str, Any]]] = {
    "padded": (64, BUDGET, {}),
    "padded, updates of 4,096": (64, BUDGET, {"samples_per_update": 4096}),
    "packed": (64, PACKED, {}),
    "packed, updates of 4,096": (64, PACKED, {"samples_per_update": 4096}),
    "two padded streams": (64, BUDGET, {}),
    "padded, 1,024 ranks": (1024, BUDGET, {}),
    "padded, 4,096 ranks": (4096, BUDGET, {}),
}


def plan(lengths: Any, budget: Budget = BUDGET, ranks: int = 8, **options: Any) -> None:
    assert planned(lengths, budget, ranks, **options).num_steps


def seconds(run: Callable[[], Any], repeats: int = 5) -> dict[str, float]:
    taken = Machine().in_turns({"": run}, repeats)[""]
    return {"median_s": float(np.median(taken)), "min_s": min(taken), "max_s": max(taken)}


def peak_mb(lengths: np.ndarray) -> float:
    """Most memory that planning takes over its input."""
    tracemalloc.start()
    plan(lengths)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e6


def speed(_machine: Machine) -> dict[str, Any]:
    million, ten = lognormal(1_000_000), lognormal(10_000_000)
    few = lognormal(20_000, longest=2048)
    million[::100_000] = 16384  # the longest possible sample occurs
    target = np.clip(
        million * np.random.default_rng(1).uniform(0.5, 1.5, len(million)), 1, None
    ).astype(np.int32)
    return {
        "token_budget_1m": seconds(lambda: plan(million)),
        "token_budget_1m_peak_mb_over_input": peak_mb(million),
        "token_budget_1m_shuffled": seconds(lambda: plan(million, shuffle=True)),
        "token_budget_10m": seconds(lambda: plan(ten), repeats=3),
        "memory_budget_1m_pretrained": seconds(lambda: plan(million, MemoryBudget(32))),
        "two_padded_streams_1m": seconds(
            lambda: plan({"tokens": million, "target": target}), repeats=3
        ),
        "dynabatch_20k_of_32": seconds(lambda: dynabatch(few, 32), repeats=1),
        "memory_budget_20k_of_32": seconds(lambda: plan(few, MemoryBudget(32), ranks=1)),
    }


def updates(_machine: Machine) -> dict[str, Any]:
    """A million samples in updates, on 8 ranks, beside a stable argsort of their lengths in the same run."""
    million = lognormal(1_000_000)
    million[::100_000] = 16384  # the longest possible sample occurs

    def planned_in(size: int, repeats: int, **options: Any) -> dict[str, float]:
        return seconds(lambda: plan(million, samples_per_update=size, **options), repeats)

    found = {"argsort": seconds(lambda: np.argsort(million, kind="stable"))}
    found["exact updates of 32"] = planned_in(32, 3)
    found["stratified updates of 32"] = planned_in(32, 5, grouping=50)
    found["exact updates of 256"] = planned_in(256, 1)
    found["stratified updates of 256"] = planned_in(256, 5, grouping=50)
    return found


def shared_s(plan: Callable[[], list[BatchPlan]], ranks: int, num_parts: int) -> float:
    """Returns CPU seconds of each rank for one of these plans, if ``num_parts`` of them are shared by the ranks.

    A rank plans some of them, packs its columns for all ranks, and unpacks its own columns of all plans. What the
    exchange itself takes is not counted.
    """
    start = time.process_time()
    plans = plan()
    of_first_rank = []
    for one in plans:
        packed = [column.packed((0, 0, 0)) for column in columns_of(one, range(ranks))]
        of_first_rank.append(packed[0])
    planning_s = time.process_time() - start
    start = time.process_time()
    assert len(list(unpacked(np.concatenate(of_first_rank)))) == len(plans)
    unpacking_s = time.process_time() - start
    return (planning_s / min(ranks, num_parts) + unpacking_s) / len(plans)


def shared_updates_ms(lengths: Any, budget: Budget, size: int, ranks: int = 8) -> float:
    """Returns milliseconds of an exact update on each rank of a planned loader, after its first few updates."""
    config = PlanConfig(samples_per_update=size, shuffle=True)
    planner = Planner.of(lengths, budget, config)
    num_updates = max(MOST_SAMPLES // (ranks * size), 1)
    num_updates = min(num_updates, planner.num_samples // size)
    order = planner.order_of(0, shuffle=True, size=size)

    def plan_part() -> list[BatchPlan]:
        plans = UpdatePlans(planner, order, ranks, num_updates)
        starts = range(0, num_updates * size, size)
        return [plans.plan(start, start + size, Cursor()) for start in starts]

    return 1000 * shared_s(plan_part, ranks, ranks)


def each(machine: Machine, samples: int = 8192, repeats: int = 5) -> dict[str, Any]:
    """Milliseconds of an exact update, by what its plan is asked for; plans of one rank and of eight in turns."""
    tokens = lognormal(samples)
    target = np.clip(tokens * np.random.default_rng(1).uniform(0.5, 1.5, samples), 1, None)
    pairs = {"tokens": tokens, "target": target.astype(np.int32)}
    kinds: dict[str, tuple[Any, Budget]] = {
        "padded": (tokens, BUDGET),
        "two padded streams": (pairs, BUDGET),
        "packed": (tokens, PACKED),
    }
    figures: dict[str, Any] = {}
    for kind, (lengths, budget) in kinds.items():
        for size in (32, 256):
            ways = {
                name: partial(plan, lengths, budget, ranks, samples_per_update=size)
                for name, ranks in {"one_rank": 1, "eight_ranks": 8}.items()
            }
            machine.in_turns(ways, 1)
            taken = machine.in_turns(ways, repeats)
            per_update = {
                name: spread([1000 * size / samples * taken_s for taken_s in times])
                for name, times in taken.items()
            }
            shared = [shared_updates_ms(lengths, budget, size) for _ in range(repeats + 1)]
            per_update["shared_by_eight"] = spread(shared[1:])
            figures[f"{size} samples, {kind}"] = per_update
    return figures


def of_ranks(_machine: Machine, samples: int = 20_000_000) -> Iterator[dict[str, Any]]:
    """CPU milliseconds that a step costs every rank, over two windows behind the first; batches of rank 0 are read."""
    tokens = np.resize(lognormal(1_000_000), samples)
    factors = np.random.default_rng(1).uniform(0.5, 1.5, samples)
    target = np.clip(tokens * factors, 1, None).astype(np.int32)
    kinds: dict[str, tuple[Any, Budget]] = {
        "padded": (tokens, BUDGET),
        "packed": (tokens, PACKED),
        "two padded streams": ({"tokens": tokens, "target": target}, BUDGET),
    }
    figures: dict[str, Any] = {}
    for kind, (lengths, budget) in kinds.items():
        planner = Planner.of(lengths, budget, PlanConfig(shuffle=True))
        figures[kind] = {}
        for ranks in (64, 512, 1024, 4096):
            plans = planner.steps_from(planner.start_of(0, ranks), ranks)
            next(plans)
            start = time.process_time()
            num_steps = 0
            for window in islice(plans, 2):
                num_steps += window.num_steps
                assert all(len(window.batches[row[0]]) for row in window.table)
            taken_s = time.process_time() - start
            figures[kind][f"ranks_{ranks}"] = 1000 * taken_s / num_steps
            shared = figures.setdefault(f"{kind}, shared", {})
            shared[f"ranks_{ranks}"] = shared_step_ms(planner, ranks)
            yield figures


def shared_step_ms(planner: Planner, ranks: int, samples: int = 1_000_000_000) -> float:
    """Returns CPU milliseconds of a step on each rank of a planned loader, in an epoch of so many samples."""
    start = replace(planner.start_of(0, ranks), windows_done=1)
    windows = planner.windows(start)
    window = planner.plan_window(windows, start, ranks)
    num_windows = samples // planner.window_size(ranks)

    def plan_part() -> list[BatchPlan]:
        return [planner.plan_window(windows, start, ranks)]

    return 1000 * shared_s(plan_part, ranks, num_windows) / window.num_steps


def exchange(_machine: Machine, ranks: int = 8, repeats: int = 5) -> dict[str, Any]:
    """CPU microseconds of an update that sharing costs each of some real gloo ranks, without the planning itself."""
    figures = {}
    for size in (32, 256):
        times = on_ranks(ranks, _exchanged, size, repeats)
        figures[f"{size} samples, padded"] = {"shared": spread(times)}
    return figures


def _exchanged(size: int, repeats: int) -> list[float]:
    """Returns the times of rank 0: its columns are packed, exchanged and unpacked; gloo's threads count."""
    world = current_world()
    num_each = MOST_SAMPLES // (world.size * size)
    config = PlanConfig(samples_per_update=size, shuffle=True)
    planner = Planner.of(lognormal(MOST_SAMPLES), BUDGET, config)
    order = planner.order_of(0, shuffle=True, size=size)
    plans = UpdatePlans(planner, order, world.size, num_each)
    numbers = range(world.rank * num_each, (world.rank + 1) * num_each)
    parts = [(number, number * size, (number + 1) * size) for number in numbers]
    of_rank = [plans.plan(start, stop, Cursor()) for _, start, stop in parts]
    times = []
    for _ in range(repeats + 1):
        world.all_max([0])
        start_s = time.process_time()
        columns = exchange_columns(world, parts, of_rank)
        times.append(1e6 * (time.process_time() - start_s) / len(columns))
    return times[1:]


def growth(_machine: Machine, samples: tuple[int, ...] = SAMPLES) -> dict[str, Any]:
    """One entry a cost: over what, which sizes, what it was there, and the exponent, the slope of the line through the logarithms
    by least squares: 1 is a cost in proportion, below it is less."""

    def least(count: int, num_ranks: int = 8, **options: Any) -> float:
        """Of some repeats: what is added to it is the machine's other work."""
        lengths, repeats = lognormal(count), 5 if count < 1_000_000 else 2
        return seconds(lambda: plan(lengths, ranks=num_ranks, **options), repeats)["min_s"]

    def loaded(count: int) -> float:
        return Machine().seconds(partial(deque, light_loader(lognormal(count)), maxlen=0))

    smaller = samples[:3]
    costs: dict[str, tuple[str, tuple[int, ...], str, Callable[[int], float]]] = {
        "planning, sorted": ("samples", samples, "CPU s", least),
        "planning, shuffle=True": ("samples", samples, "CPU s", lambda n: least(n, shuffle=True)),
        "planning, samples_per_update=256": (
            "samples",
            smaller,
            "CPU s",
            lambda n: least(n, samples_per_update=256),
        ),
        "planning for many ranks": ("ranks", RANKS, "CPU s", lambda r: least(samples[1], r)),
        "memory of planning over the input": (
            "samples",
            samples,
            "MB",
            lambda n: peak_mb(lognormal(n)),
        ),
        "online loader, main process": ("samples", smaller, "CPU s", loaded),
    }
    found = {}
    for name, (over, sizes, unit, cost) in costs.items():
        each = [cost(size) for size in sizes]
        about = {"over": over, "unit": unit, "sizes": list(sizes), "costs": each}
        found[name] = {**about, "exponent": float(np.polyfit(np.log(sizes), np.log(each), 1)[0])}
    return found


def scale(
    _machine: Machine, samples: tuple[int, ...] = (10**6, 10**7, 10**8, 10**9)
) -> Iterator[dict[str, Any]]:
    """Lengths in memory-mapped int32 files: seconds on the wall until a sampler made of them gives its first batch, until it does
    in another epoch and after a state was loaded into a new one; and most anonymous memory beyond that of the imports. Each case
    is a process of its own."""
    found: dict[str, Any] = {}
    for count in samples:
        with tempfile.TemporaryDirectory() as folder:
            for name in ("tokens", "target"):
                file = np.lib.format.open_memmap(f"{folder}/{name}.npy", "w+", np.int32, (count,))
                for start in range(0, count, CHUNK):
                    file[start : start + CHUNK] = lognormal(
                        CHUNK, longest=8192, seed=start // CHUNK % 8
                    )
            for way in SCALES:
                torch.multiprocessing.spawn(_scaled, (folder, way))
                found.setdefault(way, {})[f"{count:.0e}"] = torch.load(f"{folder}/found.pt")
                yield found


def _scaled(_rank: int, folder: str, way: str) -> None:
    ranks, budget, options = SCALES[way]
    names = ("tokens", "target") if "two" in way else ("tokens",)
    before, peak, over = _anonymous_mb(), [0.0], threading.Event()

    def watch() -> None:
        while not over.wait(0.02):  # oftener, it slows what it measures
            peak[0] = max(peak[0], _anonymous_mb())

    thread = threading.Thread(target=watch)
    thread.start()
    times = [time.perf_counter()]

    def lap(_done: Any) -> None:
        times.append(time.perf_counter())

    def made() -> LengthAwareBatchSampler:
        lengths = {name: np.load(f"{folder}/{name}.npy", mmap_mode="r") for name in names}
        return LengthAwareBatchSampler(
            lengths, budget, shuffle=True, rank=0, world_size=ranks, **options
        )

    sampler = made()
    lap(next(iter(sampler)))
    sampler.set_epoch(1)
    lap(next(iter(sampler)))
    state = sampler.state_dict(1)
    lap(state)
    again = made()
    again.load_state_dict(state)
    lap(next(iter(again)))
    over.set()
    thread.join()
    found = dict(
        zip(
            ("first_batch_s", "set_epoch_s", "save_s", "resume_s"),
            np.diff(times).tolist(),
            strict=True,
        )
    )
    torch.save({**found, "anonymous_mb": peak[0] - before}, f"{folder}/found.pt")


def _anonymous_mb() -> float:
    return int(re.findall(r"RssAnon:\s*(\d+)", Path("/proc/self/status").read_text())[0]) / 1e3
