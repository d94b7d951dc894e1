"""The online loader on one machine, and a peer in the same run."""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from benchmarks.data import CV_ONE, Numbered, collate, lengths_of
from benchmarks.machine import Machine, build, paired
from benchmarks.methods import online_dynamic_batching
from benchmarks.record import spread
from dynagroup import OnlineDataLoader, PlannedDataLoader, TokenBudget

BUDGET = TokenBudget(16_384)
PLAIN, RIVAL = "plain, 16 a batch", "online-dynamic-batching"


def light_loader(lengths: np.ndarray, **options: Any) -> OnlineDataLoader:
    """Samples that cost nothing to make, for they are their lengths: what is left is the loader."""
    how: dict[str, Any] = {
        "collate_fn": itemgetter(0),
        "length_of": int,
        "weigh": "samples",
        "shuffle": True,
    }
    return OnlineDataLoader(lengths.tolist(), BUDGET, **how, **options)


def filled(loader: Iterable[Any]) -> tuple[int, float]:
    """Samples of one epoch, and the share of real tokens."""
    samples = real = padded = 0
    for item in loader:
        mask = getattr(item, "batch", item)["attention_mask"]
        samples, real, padded = (
            samples + len(mask),
            real + int(np.count_nonzero(mask.numpy())),
            padded + mask.numel(),
        )
    return samples, real / padded


def speed(machine: Machine, samples: int = 8_000, repeats: int = 3) -> dict[str, Any]:
    """Samples a CPU second, and ratios also on the wall: the same samples of CV 1.0, two workers, three int64 tensors. As many
    samples wait in each of a pair: ours sorts a window in each worker, the rival what both have sent."""
    lengths, epochs, walls = lengths_of(CV_ONE, samples), {}, {}
    how: dict[str, Any] = {"shuffle": True, "num_workers": 2, "collate_fn": collate}
    ours = partial(OnlineDataLoader, Numbered(lengths), BUDGET, seed=1, **how)
    loaders: dict[str, Callable[[], Iterable[Any]]] = {
        PLAIN: partial(DataLoader, Numbered(lengths), batch_size=16, **how)
    }
    for waiting in (256, 2048):
        name = f"{waiting:,} samples waiting"
        loaders[f"dynagroup, {name}"] = partial(ours, window=waiting // 2)
        loaders[f"{RIVAL}, {name}"] = partial(
            online_dynamic_batching, lengths, BUDGET.max_tokens, waiting
        )

    def run(name: str) -> None:
        began = time.perf_counter()
        epochs[name] = filled(loaders[name]())
        walls.setdefault(name, []).append(time.perf_counter() - began)
        gc.collect()  # the loader's workers end, and what they took is known

    taken = machine.in_turns({name: partial(run, name) for name in loaders}, repeats)
    rates = {name: [epochs[name][0] / s for s in seconds] for name, seconds in taken.items()}
    figures: dict[str, Any] = {}
    for name, each in rates.items():
        peers = {"plain": PLAIN, "odb": name.replace("dynagroup", RIVAL)}
        peers = {short: peer for short, peer in peers.items() if peer != name}
        over = {f"over_{short}": paired(each, rates[peer]) for short, peer in peers.items()}
        wall = {
            f"wall_over_{short}": paired(walls[peer], walls[name]) for short, peer in peers.items()
        }
        figures[name] = {
            "samples_per_cpu_s": sorted(map(round, each)),
            "real_share": epochs[name][1],
            **over,
            **wall,
        }
    return figures


def same_batches(machine: Machine, samples: int = 4_000, repeats: int = 5) -> dict[str, Any]:
    """CPU microseconds a sample, workers counted, of :class:`OnlineDataLoader` and of a plain ``DataLoader`` that is told the
    same batches."""
    lengths = lengths_of(CV_ONE, samples)
    figures: dict[str, Any] = {}
    gc.freeze()  # a collection at the end of a turn then costs 2 and not 20 microseconds a sample
    for num_workers in (0, 2):
        how: dict[str, Any] = {"num_workers": num_workers, "collate_fn": collate}
        ours = partial(OnlineDataLoader, Numbered(lengths), BUDGET, seed=1, shuffle=True, **how)
        batches = [step.indices for step in ours()]
        plain = partial(DataLoader, Numbered(lengths), batch_sampler=batches, **how)

        def run(loader: Callable[[], Iterable[Any]]) -> None:
            deque(loader(), maxlen=0)
            gc.collect()

        taken = machine.in_turns(
            {"ours": partial(run, ours), "plain": partial(run, plain)}, repeats
        )
        figures[f"{num_workers} workers"] = {
            name: spread([1e6 * taken_s / samples for taken_s in times])
            for name, times in taken.items()
        }
    return figures


def own_cost(_machine: Machine, samples: int = 1_000, repeats: int = 5) -> dict[str, Any]:
    """Microseconds of the main process for a batch from one worker, of :class:`PlannedDataLoader` and of a plain ``DataLoader``
    with the same batches; and milliseconds of a packed collator for 16,000 tokens, ours and transformers'."""
    lengths = lengths_of(CV_ONE, samples)
    how: dict[str, Any] = {"collate_fn": collate, "num_workers": 1}
    planned = PlannedDataLoader(
        Numbered(lengths), lengths, BUDGET, samples_per_update=32, weigh="samples", **how
    )
    batches = [batch.tolist() for batch in planned.plan.batches]
    plain = DataLoader(Numbered(lengths), batch_sampler=batches, **how)
    taken: dict[str, list[float]] = {"planned": [], "plain": []}
    for _ in range(repeats):
        planned.set_epoch(0)
        for name, loader in {"planned": planned, "plain": plain}.items():
            taken[name].append(_main_seconds(loader) / len(batches) * 1e6)
    figures: dict[str, Any] = {name: spread(each) for name, each in taken.items()}
    figures["planned_over_plain"] = paired(taken["planned"], taken["plain"])
    return {"us_a_batch": figures, "ms_a_packed_batch": _collators(lengths, repeats)}


def _main_seconds(loader: Iterable[Any]) -> float:
    """CPU seconds of this process, without its workers and without their start."""
    items = iter(loader)
    next(items)
    began = time.process_time()
    for _ in items:
        pass
    return time.process_time() - began


def _collators(lengths: np.ndarray, repeats: int) -> dict[str, Any]:
    from transformers import DataCollatorWithFlattening

    from dynagroup.integrations.packing import packing_collator

    ours = packing_collator(build("tiny", packed=True))
    theirs = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    number = int(np.searchsorted(np.cumsum(lengths), BUDGET.max_tokens))
    lists = [{"input_ids": [7] * int(length)} for length in lengths[:number]]
    arrays = [{"input_ids": np.array(row["input_ids"])} for row in lists]
    full = [
        {**row, "attention_mask": row["input_ids"], "labels": row["input_ids"]} for row in lists
    ]
    figures: dict[str, Any] = {}
    for kind, rows in {"lists": lists, "arrays": arrays, "lists, masks, labels": full}.items():
        for name, collator in {"dynagroup": ours, "transformers": theirs}.items():
            taken = []
            for _ in range(5 * repeats):
                began = time.process_time()
                collator(rows)
                taken.append((time.process_time() - began) * 1e3)
            figures[f"{name}, {kind}"] = spread(taken)
    return figures
