"""Planning: how fast, how little memory, and how costs grow; a peer in the same run."""

import re
import tempfile
import threading
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.spawn import spawn

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
from dynagroup.update.shared_plans import MOST_SAMPLES, columns_in, columns_of, exchange_columns

SAMPLES = (10_000, 100_000, 1_000_000, 10_000_000)
RANKS = (1, 8, 64, 512, 1024)
PACKED = TokenBudget(16_384, layout="packed")
CHUNK = 1_000_000
"""Lengths written at once."""


@dataclass(frozen=True)
class Scale:
    """A plan of very many samples."""

    budget: Budget = BUDGET
    ranks: int = 64
    per_update: int | None = None
    streams: tuple[str, ...] = ("tokens",)


SCALES = {
    "padded": Scale(),
    "padded, updates of 4,096": Scale(per_update=4096),
    "packed": Scale(PACKED),
    "packed, updates of 4,096": Scale(PACKED, per_update=4096),
    "two padded streams": Scale(streams=("tokens", "target")),
    "padded, 1,024 ranks": Scale(ranks=1024),
    "padded, 4,096 ranks": Scale(ranks=4096),
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


def a_million() -> np.ndarray:
    """Lengths, among them the longest possible one."""
    lengths = lognormal(1_000_000)
    lengths[::100_000] = 16384
    return lengths


def target_of(tokens: np.ndarray) -> np.ndarray:
    """Target lengths that go with these source lengths."""
    factors = np.random.default_rng(1).uniform(0.5, 1.5, len(tokens))
    return np.clip(tokens * factors, 1, None).astype(np.int32)


def speed(_machine: Machine) -> dict[str, Any]:
    million = a_million()
    pairs = {"tokens": million, "target": target_of(million)}
    ten = lognormal(10_000_000)
    few = lognormal(20_000, longest=2048)
    return {
        "token_budget_1m": seconds(lambda: plan(million)),
        "token_budget_1m_peak_mb_over_input": peak_mb(million),
        "token_budget_1m_shuffled": seconds(lambda: plan(million, shuffle=True)),
        "token_budget_10m": seconds(lambda: plan(ten), repeats=3),
        "memory_budget_1m_pretrained": seconds(lambda: plan(million, MemoryBudget(32))),
        "two_padded_streams_1m": seconds(lambda: plan(pairs), repeats=3),
        "dynabatch_20k_of_32": seconds(lambda: dynabatch(few, 32), repeats=1),
        "memory_budget_20k_of_32": seconds(lambda: plan(few, MemoryBudget(32), ranks=1)),
    }


def updates(_machine: Machine) -> dict[str, Any]:
    """A million samples in updates, on 8 ranks, beside a stable argsort of their lengths in the same run."""
    million = a_million()

    def planned_in(size: int, repeats: int, grouping: int | None = None) -> dict[str, float]:
        return seconds(lambda: plan(million, samples_per_update=size, grouping=grouping), repeats)

    return {
        "argsort": seconds(lambda: np.argsort(million, kind="stable")),
        "exact updates of 32": planned_in(32, 3),
        "stratified updates of 32": planned_in(32, 5, grouping=50),
        "exact updates of 256": planned_in(256, 1),
        "stratified updates of 256": planned_in(256, 5, grouping=50),
    }


def shared_s(plan: Callable[[], list[BatchPlan]], ranks: int, num_parts: int) -> float:
    """Returns CPU seconds of each rank for one of these plans, if ``num_parts`` of them are shared by the ranks.

    A rank plans some of them, packs its columns for all ranks, and unpacks its own columns of all plans. What the
    exchange itself takes is not counted.
    """
    start = time.process_time()
    plans = plan()
    of_first_rank = []
    for one in plans:
        packed = [column.as_vector((0, 0, 0)) for column in columns_of(one, range(ranks))]
        of_first_rank.append(packed[0])
    planning_s = time.process_time() - start
    start = time.process_time()
    assert len(list(columns_in(np.concatenate(of_first_rank)))) == len(plans)
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
    pairs = {"tokens": tokens, "target": target_of(tokens)}
    kinds: dict[str, tuple[Any, Budget]] = {
        "padded": (tokens, BUDGET),
        "two padded streams": (pairs, BUDGET),
        "packed": (tokens, PACKED),
    }
    figures: dict[str, Any] = {}
    for kind, (lengths, budget) in kinds.items():
        for size in (32, 256):
            plan_for = partial(plan, lengths, budget, samples_per_update=size)
            ways = {
                "one_rank": partial(plan_for, ranks=1),
                "eight_ranks": partial(plan_for, ranks=8),
            }
            machine.in_turns(ways, 1)
            per_update = {}
            for name, times in machine.in_turns(ways, repeats).items():
                milliseconds = [1000 * size / samples * of_plan for of_plan in times]
                per_update[name] = spread(milliseconds)
            shared = [shared_updates_ms(lengths, budget, size) for _ in range(repeats + 1)]
            per_update["shared_by_eight"] = spread(shared[1:])
            figures[f"{size} samples, {kind}"] = per_update
    return figures


def of_ranks(_machine: Machine, samples: int = 20_000_000) -> Iterator[dict[str, Any]]:
    """CPU milliseconds that a step costs every rank, over two windows behind the first; batches of rank 0 are read."""
    tokens = np.resize(lognormal(1_000_000), samples)
    pairs = {"tokens": tokens, "target": target_of(tokens)}
    kinds: dict[str, tuple[Any, Budget]] = {
        "padded": (tokens, BUDGET),
        "packed": (tokens, PACKED),
        "two padded streams": (pairs, BUDGET),
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
    """Returns the times of rank 0: its columns are joined, exchanged and read; gloo's threads count."""
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


Cost = Callable[[int], float]


def growth(_machine: Machine, samples: tuple[int, ...] = SAMPLES) -> dict[str, Any]:
    """One entry a cost: over what, which sizes, what it was there, and the exponent, the slope of the line through the logarithms
    by least squares: 1 is a cost in proportion, below it is less."""

    def least(count: int, num_ranks: int = 8, **options: Any) -> float:
        """Of some repeats: what is added to it is the machine's other work."""
        lengths = lognormal(count)
        repeats = 5 if count < 1_000_000 else 2
        return seconds(lambda: plan(lengths, ranks=num_ranks, **options), repeats)["min_s"]

    def loaded(count: int) -> float:
        return Machine().seconds(partial(deque, light_loader(lognormal(count)), maxlen=0))

    def figures(over: str, unit: str, sizes: tuple[int, ...], cost: Cost) -> dict[str, Any]:
        costs = [cost(size) for size in sizes]
        slope, _ = np.polyfit(np.log(sizes), np.log(costs), 1)
        return {
            "over": over,
            "unit": unit,
            "sizes": list(sizes),
            "costs": costs,
            "exponent": float(slope),
        }

    smaller = samples[:3]
    in_updates = partial(least, samples_per_update=256)
    many_ranks = partial(least, samples[1])
    return {
        "planning, sorted": figures("samples", "CPU s", samples, least),
        "planning, shuffle=True": figures(
            "samples", "CPU s", samples, partial(least, shuffle=True)
        ),
        "planning, samples_per_update=256": figures("samples", "CPU s", smaller, in_updates),
        "planning for many ranks": figures("ranks", "CPU s", RANKS, many_ranks),
        "memory of planning over the input": figures(
            "samples", "MB", samples, lambda count: peak_mb(lognormal(count))
        ),
        "online loader, main process": figures("samples", "CPU s", smaller, loaded),
    }


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
                _write_lengths(f"{folder}/{name}.npy", count)
            for way in SCALES:
                spawn(_scaled, (folder, way))
                found.setdefault(way, {})[f"{count:.0e}"] = torch.load(f"{folder}/found.pt")
                yield found


def _write_lengths(path: str, count: int) -> None:
    file = np.lib.format.open_memmap(path, "w+", np.int32, (count,))
    for start in range(0, count, CHUNK):
        seed = start // CHUNK % 8
        file[start : start + CHUNK] = lognormal(CHUNK, longest=8192, seed=seed)


def _scaled(_rank: int, folder: str, way: str) -> None:
    before_mb = _anonymous_mb()
    most_mb = [before_mb]
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.02):  # oftener, it slows what it measures
            most_mb[0] = max(most_mb[0], _anonymous_mb())

    thread = threading.Thread(target=watch)
    thread.start()
    figures = _seconds_of_scale(folder, SCALES[way])
    is_over.set()
    thread.join()
    torch.save({**figures, "anonymous_mb": most_mb[0] - before_mb}, f"{folder}/found.pt")


def _seconds_of_scale(folder: str, scale: Scale) -> dict[str, float]:
    def new_sampler() -> LengthAwareBatchSampler:
        files = {name: f"{folder}/{name}.npy" for name in scale.streams}
        return LengthAwareBatchSampler(
            {name: np.load(file, mmap_mode="r") for name, file in files.items()},
            scale.budget,
            shuffle=True,
            samples_per_update=scale.per_update,
            rank=0,
            world_size=scale.ranks,
        )

    begun = time.perf_counter()
    sampler = new_sampler()
    next(iter(sampler))
    has_first = time.perf_counter()
    sampler.set_epoch(1)
    next(iter(sampler))
    has_other_epoch = time.perf_counter()
    state = sampler.state_dict(1)
    is_saved = time.perf_counter()
    resumed = new_sampler()
    resumed.load_state_dict(state)
    next(iter(resumed))
    is_resumed = time.perf_counter()
    return {
        "first_batch_s": has_first - begun,
        "set_epoch_s": has_other_epoch - has_first,
        "save_s": is_saved - has_other_epoch,
        "resume_s": is_resumed - is_saved,
    }


def _anonymous_mb() -> float:
    status = Path("/proc/self/status").read_text()
    kilobytes = re.findall(r"RssAnon:\s*(\d+)", status)[0]
    return int(kilobytes) / 1e3
