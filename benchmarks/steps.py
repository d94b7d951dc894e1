"""What new shapes of batches cost on a GPU, with and without cuDNN's attention, which torch prefers on Hopper and Blackwell; and
training in turns, by how many tokens a step is priced."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from benchmarks.machine import Machine, build
from benchmarks.train import Run, job_of, text_of

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
CASE, SLICE_S, PRICES, NEW = "0.5B, CV 1.0", 4.0, (730, 2048, 6000), 12
RIVALS = ("fixed", "sorted inside the update", "transformers group_by_length")


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
    figures: dict[str, Any] = {"steps": [], "new_shapes": [], "train": []}

    def step(number: int, longest: int) -> None:
        ids = torch.randint(3, model.config.vocab_size, (number, longest), device=machine.device)
        mask = torch.ones_like(ids)
        mask[0, -1] = 0  # so that there is a mask
        model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()

    for on in (True, False):
        with cudnn(on):
            for shape in SHAPES[:1] if machine.dry else SHAPES:
                first, _ = (machine.seconds(lambda: step(*shape)) for _ in range(2))  # noqa: B023
                later = machine.seconds(lambda: [step(*shape) for _ in range(4)]) / 4  # noqa: B023
                figures["steps"].append(
                    {
                        "cudnn": on,
                        "n": shape[0],
                        "length": shape[1],
                        "first_s": first,
                        "seconds": later,
                    }
                )
            fresh = [(4, 301 + 8 * on + 17 * number) for number in range(NEW)]
            new, again = (
                machine.seconds(lambda: [step(*shape) for shape in fresh]) / NEW  # noqa: B023
                for _ in range(2)  # noqa: B023
            )
            figures["new_shapes"].append({"cudnn": on, "new_s": new, "again_s": again})
        optimizer.zero_grad(set_to_none=True)
        yield figures
    job = job_of(machine, CASE, 1.0)
    ways = {name: (name, job) for name in RIVALS}
    ways |= {
        f"dynagroup, per_step {p}": (
            "dynagroup",
            replace(job, work=replace(job.work, per_step=p), updates_so_far={}),
        )
        for p in PRICES
    }
    runs = {
        way: Run(name, own, machine, "0.5B", text_of(machine, CASE))
        for way, (name, own) in ways.items()
    }
    turns = [
        (way, on)
        for on in (False, True)
        for way in ways
        if not on or way in (*RIVALS[:2], "dynagroup, per_step 2048")
    ]
    for way, on in turns * (1 if machine.dry else 3):
        if not machine.has(30):
            break
        one = runs[way]
        one.model, one.optimizer = model, optimizer
        with cudnn(on):
            one.update()  # not counted
            one.timed, before = [], (one.batches, one.padded, one.real)
            while not one.timed or (
                sum(spent for *_, spent in one.timed) < SLICE_S and not machine.dry
            ):
                one.timed.append(one.update())
        batches, padded, real = (
            now - then
            for now, then in zip((one.batches, one.padded, one.real), before, strict=True)
        )
        row = {
            "way": way,
            "cudnn": on,
            "updates": len(one.timed),
            "real_tokens": real,
            "padding": 1 - real / padded,
        }
        row |= {
            "seconds": sum(spent for *_, spent in one.timed),
            "batches_per_update": batches / len(one.timed),
        }
        figures["train"].append(row)
        yield figures


def shown(figures: dict[str, Any]) -> list[str]:
    rates: dict[str, list[float]] = {}
    for row in figures["train"]:
        rates.setdefault(f"{row['way']}, cuDNN {'on' if row['cudnn'] else 'off'}", []).append(
            row["real_tokens"] / row["seconds"]
        )
    told = "a new shape: {new_s:.3f} s, again: {again_s:.3f} s (cuDNN: {cudnn})"
    new = [told.format(**row) for row in figures["new_shapes"]]
    return [
        *new,
        *(
            f"{way}: {', '.join(f'{rate:,.0f}' for rate in found)} real tokens a second"
            for way, found in rates.items()
        ),
    ]
