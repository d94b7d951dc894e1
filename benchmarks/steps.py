"""What new shapes of batches cost on a GPU, with and without cuDNN's attention, which torch prefers on Hopper and Blackwell; and
training in turns, by how many tokens a step is priced."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.device_train import Case, job_of, run_of
from benchmarks.machine import Machine, build, noted
from benchmarks.price import DRY, work_of_steps
from benchmarks.train import Run
from dynagroup import Work

SHAPES = (
    (2, 32),
    (2, 256),
    (2, 512),
    (4, 512),
    (8, 512),
    (16, 512),
    (32, 512),
    (4, 2048),
    (4, 4096),
)
CASE = Case("0.5B", "CV 1.0")
SLICE_S = 4.0
"""Seconds of a way's turn."""
PRICES = (6000,)
AS_MEASURED = "dynagroup, work as measured"
"""Its price and its crossover are fitted to steps that were timed here. The prices above have the crossover of ``Work.of``."""
MEASURED = (
    (1, 128),
    (1, 1024),
    (1, 4096),
    (4, 128),
    (4, 1024),
    (4, 4096),
    (16, 64),
    (16, 256),
    (16, 1024),
    (64, 64),
    (64, 128),
    (64, 256),
)
"""Samples and tokens of the steps to which ``Work`` is fitted."""
NUM_NEW = 12
"""Shapes that come once."""
RIVALS = ("fixed", "sorted inside the update", "transformers group_by_length")
BY_CONFIG = "dynagroup, Work.of"
WITH_CUDNN = ("fixed", "sorted inside the update", BY_CONFIG)


@contextmanager
def cudnn(on: bool) -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(on)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def run(machine: Machine) -> Iterator[dict[str, Any]]:
    """Yields the figures so far: seconds of a shape's first step and of later ones, of shapes that come once, and real tokens a
    second of updates of 64 samples, every way in turns of some seconds with a model that they share."""
    model = build("0.5B", machine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=machine.is_gpu)
    figures: dict[str, Any] = {"steps": [], "new_shapes": [], "train": [], "failed": {}}

    def step(number: int, longest: int) -> None:
        ids = torch.randint(3, model.config.vocab_size, (number, longest), device=machine.device)
        mask = torch.ones_like(ids)
        mask[0, -1] = 0  # so that there is a mask
        model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()

    for on in (True, False):
        with cudnn(on):
            for shape in SHAPES[:1] if machine.dry else SHAPES:
                figures["steps"].append({"cudnn": on, **_step_seconds(machine, step, shape)})
            figures["new_shapes"].append({"cudnn": on, **_new_shapes(machine, step, 301 + 8 * on)})
        optimizer.zero_grad(set_to_none=True)
        yield figures
    work = None
    with noted(figures["failed"], AS_MEASURED):  # the fit needs scipy
        work = work_of_steps(model, machine, DRY if machine.dry else MEASURED, repeats=2)
        figures["measured_work"] = {
            "per_step": work.per_step,
            "crossover": min(work.crossover, 1e9),
        }
    optimizer.zero_grad(set_to_none=True)
    runs = _runs(machine, work)
    turns = [(False, way) for way in runs]
    turns += [(True, way) for way in runs if way in WITH_CUDNN]
    for _, (on, way) in product(range(1 if machine.dry else 3), turns):
        if not machine.has(30):
            return
        runs[way].model = model
        runs[way].optimizer = optimizer
        with cudnn(on):
            row = _turn(runs[way])
        figures["train"].append({"way": way, "cudnn": on, **row})
        yield figures


Step = Callable[[int, int], None]


def _step_seconds(machine: Machine, step: Step, shape: tuple[int, int]) -> dict[str, Any]:
    number, longest = shape
    one_step = partial(step, number, longest)
    first_s = machine.seconds(one_step)
    machine.seconds(one_step)
    four_steps = machine.seconds(lambda: [one_step() for _ in range(4)])
    return {"n": number, "length": longest, "first_s": first_s, "seconds": four_steps / 4}


def _new_shapes(machine: Machine, step: Step, shortest: int) -> dict[str, Any]:
    """Seconds a step of shapes that come once, then again."""
    lengths = [shortest + 17 * number for number in range(NUM_NEW)]

    def steps() -> None:
        for longest in lengths:
            step(4, longest)

    new_s = machine.seconds(steps) / NUM_NEW
    again_s = machine.seconds(steps) / NUM_NEW
    return {"new_s": new_s, "again_s": again_s}


def _runs(machine: Machine, work: Work | None) -> dict[str, Run]:
    """Way -> its training; ``work``: as measured, or None."""
    job = job_of(machine, CASE)
    works = {BY_CONFIG: job.work}
    if work is not None:
        works[AS_MEASURED] = work
    for price in PRICES:
        works[f"dynagroup, per_step {price}"] = replace(job.work, per_step=price)
    runs = {name: run_of(name, job, machine, CASE) for name in RIVALS}
    for name, of_way in works.items():
        priced = replace(job, work=of_way, updates_so_far={})
        runs[name] = run_of("dynagroup", priced, machine, CASE)
    return runs


def _turn(run: Run) -> dict[str, Any]:
    """Updates for some seconds, after one that is not counted."""
    run.update()
    before = copy(run.counts)
    seconds = 0.0
    while seconds == 0.0 or (seconds < SLICE_S and not run.machine.dry):
        seconds += run.update().seconds
    updates = run.counts.updates - before.updates
    batches = run.counts.batches - before.batches
    real_tokens = run.counts.real_tokens - before.real_tokens
    padded_tokens = run.counts.padded_tokens - before.padded_tokens
    return {
        "updates": updates,
        "real_tokens": real_tokens,
        "padding": 1 - real_tokens / padded_tokens,
        "seconds": seconds,
        "batches_per_update": batches / updates,
    }


def shown(figures: dict[str, Any]) -> list[str]:
    lines = []
    for row in figures["new_shapes"]:
        seconds = f"{row['new_s']:.3f} s, again: {row['again_s']:.3f} s"
        lines.append(f"a new shape: {seconds} (cuDNN: {row['cudnn']})")
    rates: dict[str, list[str]] = {}
    for row in figures["train"]:
        state = "on" if row["cudnn"] else "off"
        way = f"{row['way']}, cuDNN {state}"
        rate = row["real_tokens"] / row["seconds"]
        rates.setdefault(way, []).append(f"{rate:,.0f}")
    for way, of_turns in rates.items():
        lines.append(f"{way}: {', '.join(of_turns)} real tokens a second")
    for way, message in figures["failed"].items():
        lines.append(f"{way}: {message}")
    return lines
