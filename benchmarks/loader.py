"""The online loader on one machine, and a peer in the same run."""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
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
PLAIN = "plain, 16 a batch"
RIVAL = "online-dynamic-batching"


def light_loader(lengths: np.ndarray, **options: Any) -> OnlineDataLoader:
    """Samples that cost nothing to make, for they are their lengths: what is left is the loader."""
    return OnlineDataLoader(
        lengths.tolist(),
        BUDGET,
        collate_fn=itemgetter(0),
        length_of=int,
        weigh="samples",
        shuffle=True,
        **options,
    )


def filled(loader: Iterable[Any]) -> tuple[int, float]:
    """Samples of one epoch, and the share of real tokens."""
    samples = 0
    real = 0
    padded = 0
    for item in loader:
        mask = getattr(item, "batch", item)["attention_mask"]
        samples += len(mask)
        real += int(np.count_nonzero(mask.numpy()))
        padded += mask.numel()
    return samples, real / padded


def speed(machine: Machine, samples: int = 8_000, repeats: int = 3) -> dict[str, Any]:
    """Samples a CPU second, and ratios also on the wall: the same samples of CV 1.0, two workers, three int64 tensors. As many
    samples wait in each of a pair: ours sorts a window in each worker, the rival what both have sent."""
    lengths = lengths_of(CV_ONE, samples)
    data = Numbered(lengths)
    loaders: dict[str, Callable[[], Iterable[Any]]] = {
        PLAIN: partial(
            DataLoader, data, batch_size=16, shuffle=True, num_workers=2, collate_fn=collate
        )
    }
    for waiting in (256, 2048):
        name = f"{waiting:,} samples waiting"
        loaders[f"dynagroup, {name}"] = partial(
            OnlineDataLoader,
            data,
            BUDGET,
            window=waiting // 2,
            seed=1,
            shuffle=True,
            num_workers=2,
            collate_fn=collate,
        )
        loaders[f"{RIVAL}, {name}"] = partial(
            online_dynamic_batching, lengths, BUDGET.max_tokens, waiting
        )
    epochs: dict[str, tuple[int, float]] = {}
    walls: dict[str, list[float]] = {name: [] for name in loaders}

    def run(name: str) -> None:
        began = time.perf_counter()
        epochs[name] = filled(loaders[name]())
        walls[name].append(time.perf_counter() - began)
        gc.collect()  # the loader's workers end, and what they took is known

    times = machine.in_turns({name: partial(run, name) for name in loaders}, repeats)
    rates = {}
    for name, (num_samples, _) in epochs.items():
        rates[name] = [num_samples / seconds for seconds in times[name]]
    figures: dict[str, Any] = {}
    for name, (_, real_share) in epochs.items():
        peers = {"plain": PLAIN, "odb": name.replace("dynagroup", RIVAL)}
        peers = {short: peer for short, peer in peers.items() if peer != name}
        figures[name] = {
            "samples_per_cpu_s": sorted(map(round, rates[name])),
            "real_share": real_share,
        }
        for short, peer in peers.items():
            figures[name][f"over_{short}"] = paired(rates[name], rates[peer])
        for short, peer in peers.items():
            figures[name][f"wall_over_{short}"] = paired(walls[peer], walls[name])
    return figures


def same_batches(machine: Machine, samples: int = 4_000, repeats: int = 5) -> dict[str, Any]:
    """CPU microseconds a sample, workers counted, of :class:`OnlineDataLoader` and of a plain ``DataLoader`` that is told the
    same batches."""
    lengths = lengths_of(CV_ONE, samples)
    data = Numbered(lengths)
    figures: dict[str, Any] = {}
    gc.freeze()  # a collection at the end of a turn then costs 2 and not 20 microseconds a sample
    for num_workers in (0, 2):
        ours = partial(
            OnlineDataLoader,
            data,
            BUDGET,
            seed=1,
            shuffle=True,
            num_workers=num_workers,
            collate_fn=collate,
        )
        batches = [list(step.indices) for step in ours()]
        plain = partial(
            DataLoader, data, batch_sampler=batches, num_workers=num_workers, collate_fn=collate
        )
        ways = {"ours": partial(_read, ours), "plain": partial(_read, plain)}
        of_workers = {}
        for name, times in machine.in_turns(ways, repeats).items():
            of_workers[name] = spread([1e6 * seconds / samples for seconds in times])
        figures[f"{num_workers} workers"] = of_workers
    return figures


def _read(loader: Callable[[], Iterable[Any]]) -> None:
    deque(loader(), maxlen=0)
    gc.collect()


def own_cost(_machine: Machine, samples: int = 1_000, repeats: int = 5) -> dict[str, Any]:
    """Microseconds of the main process for a batch from one worker, of :class:`PlannedDataLoader` and of a plain ``DataLoader``
    with the same batches; and milliseconds of a packed collator for 16,000 tokens, ours and transformers'."""
    lengths = lengths_of(CV_ONE, samples)
    data = Numbered(lengths)
    planned = PlannedDataLoader(
        data,
        lengths,
        BUDGET,
        samples_per_update=32,
        weigh="samples",
        collate_fn=collate,
        num_workers=1,
    )
    batches = [batch.tolist() for batch in planned.plan.batches]
    plain = DataLoader(data, batch_sampler=batches, collate_fn=collate, num_workers=1)
    us_planned = []
    us_plain = []
    for _ in range(repeats):
        planned.set_epoch(0)
        us_planned.append(1e6 * _main_seconds(planned) / len(batches))
        us_plain.append(1e6 * _main_seconds(plain) / len(batches))
    us_a_batch = {
        "planned": spread(us_planned),
        "plain": spread(us_plain),
        "planned_over_plain": paired(us_planned, us_plain),
    }
    return {"us_a_batch": us_a_batch, "ms_a_packed_batch": _collators(lengths, repeats)}


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
    lists: list[dict[str, Any]] = [{"input_ids": [7] * int(n)} for n in lengths[:number]]
    arrays = [{"input_ids": np.array(row["input_ids"])} for row in lists]
    full = []
    for row in lists:
        ids = row["input_ids"]
        full.append({"input_ids": ids, "attention_mask": ids, "labels": ids})
    forms = {"lists": lists, "arrays": arrays, "lists, masks, labels": full}
    collators = {"dynagroup": ours, "transformers": theirs}
    figures: dict[str, Any] = {}
    for (kind, rows), (name, collator) in product(forms.items(), collators.items()):
        milliseconds = []
        for _ in range(5 * repeats):
            began = time.process_time()
            collator(rows)
            milliseconds.append(1e3 * (time.process_time() - began))
        figures[f"{name}, {kind}"] = spread(milliseconds)
    return figures
