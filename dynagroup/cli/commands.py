"""The six commands: which options each takes, and what it prints. Pictures are asked for before the work they show."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynagroup.cli.inputs import lengths_of
from dynagroup.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dynagroup.budget.base import Budget
    from dynagroup.memory.fits import Fits
    from dynagroup.plan.report import Comparison, Way
    from dynagroup.shapes import Streams

__all__ = ["COMMANDS"]

WORTH = 0.95
"""Predicted time, as a share of today's, above which nothing is worth a change."""


@dataclass(frozen=True)
class Command:
    """One command: what it does, the names of its options, and where it differs from their defaults."""

    run: Callable[[argparse.Namespace], None]
    does: str
    options: str
    required: Sequence[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)


# What several commands share


def _print(args: argparse.Namespace, figures: Mapping[str, Any], text: object) -> None:
    print(json.dumps(figures, indent=1) if args.json else text)


def _check_picture(args: argparse.Namespace) -> None:
    if args.picture:
        from dynagroup.plan.plots import picture_path

        picture_path(args.picture)


def _show_picture(args: argparse.Namespace, draw: Callable[[], Figure]) -> None:
    if args.picture:
        from dynagroup.plan.plots import save_picture

        save_picture(draw(), args.picture)
        if not args.json:
            print(f"picture: {args.picture}")


def _show_streams(args: argparse.Namespace, streams: Streams) -> None:
    """Say which streams were found, where there are several; beside the output where machines read that."""
    from dynagroup.shapes import said

    if len(streams) > 1:
        how = "padded streams" if args.layout == "padded" else "streams"
        line = f"{how}: {', '.join(map(said, streams))} (a batch holds the tokens of all; to take others: --column NAME[,NAME])"
        print(line, file=sys.stderr if args.json else sys.stdout)


def _workload(args: argparse.Namespace) -> dict[str, Any]:
    """What was said about the work, as arguments of ``Workload.from_model``."""
    told = {
        "dtype": args.dtype,
        "autocast": args.autocast,
        "gradient_checkpointing": args.gradient_checkpointing or None,
    }
    told["max_new_tokens"] = args.max_new_tokens if args.mode == "generate" else None
    return {name: value for name, value in told.items() if value is not None}


# plan, compare


def plan(args: argparse.Namespace) -> None:
    from dynagroup.plan.sampler import LengthAwareBatchSampler

    _check_picture(args)
    lengths, budget = lengths_of(args), _budget_of(args)
    options = {name: getattr(args, name) for name in ("shuffle", "window", "samples_per_update", "seed", "world_size")}
    sampler = LengthAwareBatchSampler(lengths, budget, rank=0, **options)
    sampler.set_epoch(args.epoch)
    found = sampler.plan
    _show_streams(args, lengths)
    _print(args, {**found.statistics, "fingerprint": found.fingerprint}, found.report())
    _show_picture(args, found.plot)


def _budget_of(args: argparse.Namespace) -> Budget:
    from dynagroup.budget.memory import MemoryBudget
    from dynagroup.budget.tokens import TokenBudget

    multiple = args.pad_to_multiple_of
    if (args.max_tokens is None) == (args.batch_size is None):
        raise ConfigError("give either `--max-tokens` or `--batch-size`: one of them says what fits")
    if args.max_tokens is None:
        return MemoryBudget(args.batch_size, headroom=args.headroom, pad_to_multiple_of=multiple)
    return TokenBudget(args.max_tokens, max_samples=args.max_samples, pad_to_multiple_of=multiple, layout=args.layout)


def compare(args: argparse.Namespace) -> None:
    _check_picture(args)
    found = _comparison(args)
    _show_streams(args, found.lengths)
    _print(args, found.figures(), found.report())
    _show_picture(args, found.plot)


def _comparison(args: argparse.Namespace) -> Comparison:
    from dynagroup.budget.tokens import TokenBudget
    from dynagroup.memory.trace.model import as_config
    from dynagroup.plan.cost import Work
    from dynagroup.plan.report import compare

    lengths = lengths_of(args)
    longest = sum(int(values.max()) for values in lengths.values())
    most = args.batch_size * max(longest, 1) if args.max_tokens is None else args.max_tokens
    budget = TokenBudget(max(most, 1), layout=args.layout, pad_to_multiple_of=args.pad_to_multiple_of)
    work = None if args.model is None else Work.of(as_config(args.model))
    options = {name: getattr(args, name) for name in ("world_size", "accumulation", "seed")}
    return compare(lengths, args.batch_size, budget=budget, work=work, **options)


# doctor


def doctor(args: argparse.Namespace) -> None:
    found = _comparison(args)
    _show_streams(args, found.lengths)
    memory, safe = _memory(args, found)
    findings = _diagnosis(found, memory, safe, args.layout)
    width = max(map(len, findings))
    report = "\n".join(f"{name.ljust(width)}  {text}" for name, text in findings.items())
    _print(args, {"findings": findings, **found.figures()}, report)


def _diagnosis(found: Comparison, memory: str | None, safe: int | None, layout: str) -> dict[str, str]:
    """Five findings by name: what is wasted, how long ranks wait, what memory does, what to change, what that gives."""
    today, grouped, same, free = found.ways[:4]
    several = found.world_size > 1
    return {
        "waste": f"{today.padding:.0%} of the tokens that {today.name} batches multiply are padding"
        f" (group_by_length: {grouped.padding:.0%})",
        "ranks": f"{found.world_size} ranks wait {today.waiting:.0%} of their time for the slowest of a step"
        if several
        else "one rank: nobody waits",
        "memory": memory or _spread(today),
        "change": _change(found, layout, safe),
        "gain": f"the same updates in {_share(same, today)} of the time ({same.padding:.0%} padding"
        + (f", {same.waiting:.0%} waiting" if several else "")
        + f"); updates as large as fit, shuffle=True: {_share(free, today)}",
    }


def _share(way: Way, today: Way) -> str:
    return f"{way.time / max(today.time, 1e-9):.2f}"


def _spread(today: Way) -> str:
    import numpy as np

    middle = int(np.median(today.padded)) if len(today.padded) else 0
    share = middle / max(today.largest_batch, 1)
    return (
        f"the largest batch has {today.largest_batch:,} tokens, a typical one {middle:,} ({share:.0%} of it); "
        "name --model and --gpu-memory to see whether it fits"
    )


def _change(found: Comparison, layout: str, safe: int | None) -> str:
    today, _, same, free = found.ways[:4]
    if min(same.time, free.time) > WORTH * today.time:
        return "nothing: lengths vary too little for other batches to pay"
    packed = ', layout="packed"' if layout == "packed" else ""
    most = getattr(found.budget, "max_tokens", today.largest_batch)
    budget = f"TokenBudget({most if safe is None else min(most, max(safe, 1))}{packed})"
    if same.time > WORTH * today.time:
        return (
            f"PlannedDataLoader(dataset, lengths, {budget}), updates as large as fit, or more samples an update (gradient "
            f"accumulation): {found.samples_per_update} are too few to sort"
        )
    how = f"samples_per_update={found.samples_per_update}"
    return f"PlannedDataLoader(dataset, lengths, {budget}, {how}); with the Trainer: dynagroup={budget}"


def _memory(args: argparse.Namespace, found: Comparison) -> tuple[str | None, int | None]:
    """Whether as many samples as today fit the device with the longest of every stream, how many would, and a token budget
    that is safe: for samples as long in every stream as the longest of any, counting all streams."""
    from dynagroup.memory.fits import what_fits
    from dynagroup.shapes import said

    if args.gpu_memory is None:
        return None, None
    if args.model is None:
        raise ConfigError("`--gpu-memory` needs `--model`, to know what a batch takes")
    longest = {name: max(int(values.max()), 1) for name, values in found.lengths.items()}
    options = {"mode": args.mode, "pad_to_multiple_of": args.pad_to_multiple_of, "lengths": [max(longest.values())]}
    fits = what_fits(args.model, args.gpu_memory, **options, **_workload(args))
    most = fits.most_samples(longest)
    what = " and ".join(f"{units:,} {said(name)}" for name, units in longest.items())
    too_many = f"do not fit {args.gpu_memory}: {most} do"
    answer = too_many if most < found.batch_size else f"fit {args.gpu_memory}, and {most} would"
    safe = f"a budget that is safe: {fits.max_tokens:,} tokens"
    return f"{found.batch_size} samples of {what} {answer} ({fits.assumes}); {safe}", fits.max_tokens


# fit, profile


def fit(args: argparse.Namespace) -> None:
    from dynagroup.memory.fits import what_fits

    _check_picture(args)
    told = {"layout": "packed" if args.layout == "packed" else None, "lora": args.lora or None}
    told |= {"sharding": "fsdp", "num_ranks": args.fsdp} if args.fsdp is not None else {}
    how = _workload(args) | {name: value for name, value in told.items() if value is not None}
    options = {name: getattr(args, name) for name in ("mode", "headroom", "pad_to_multiple_of", "lengths")}
    found = what_fits(args.model, args.gpu_memory, **options, **how)
    figures = {"limit_bytes": found.limit_bytes, **_figures(found), "samples": _samples(found), "code": found.code}
    _print(args, figures, found)
    _show_picture(args, lambda: _curve(found))


def _figures(found: Fits) -> dict[str, Any]:
    names = ("headroom", "max_tokens", "new_tokens")
    return {"static_bytes": found.memory.static_bytes, **{name: getattr(found, name) for name in names}}


def _samples(found: Fits) -> dict[str, int]:
    return dict(zip(map(str, found.lengths), found.samples, strict=True))


def _curve(found: Fits) -> Figure:
    from dynagroup.plan.plots import new_figure

    figure = new_figure(6, 3.6)
    found.draw(figure.subplots())
    return figure


def profile(args: argparse.Namespace) -> None:
    from dynagroup.memory import simulate, what_fits
    from dynagroup.memory.trace.model import as_config

    _check_picture(args)
    config, rows = as_config(args.model), None
    if args.measure:
        found, rows = _measured(args, config)
    else:
        found = what_fits(args.model, args.gpu_memory, mode=args.mode, headroom=args.headroom, **_workload(args))
        if args.shapes or args.output:
            shapes = args.shapes or [(count, length) for length, count, *_ in found.rows() if count]
            rows = simulate(config, found.memory.workload, shapes)  # type: ignore[attr-defined]
    table = f"{_sizes(rows.rows[: len(args.shapes)])}\n\n" if args.shapes and rows is not None else ""
    figures = {"device_bytes": found.limit_bytes, **_figures(found), "samples_that_fit": _samples(found)}
    _print(args, figures, f"{table}{found}")
    if args.output and rows is not None:
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
        rows.to_parquet(args.output)
    _show_picture(args, lambda: _curve(found))


def _measured(args: argparse.Namespace, config: Any) -> tuple[Fits, Any]:
    """What fits by rows measured on the CUDA device here, and the rows."""
    from dynagroup.device import CudaDevice
    from dynagroup.memory import Fits, ProfiledMemory, Workload, measure
    from dynagroup.memory.fits import new_tokens_of, parsed_bytes, usual_lengths
    from dynagroup.memory.trace.model import as_random_model

    device, limit = CudaDevice(), parsed_bytes(args.gpu_memory)  # refuses before a model is built
    lengths, workload = usual_lengths(config), Workload.from_model(config, args.mode, **_workload(args))
    model = as_random_model(config, workload, device.device)
    shapes = [*args.shapes, *((count, length) for length in lengths for count in (2, 8))]
    rows = measure(model, workload, shapes, device=device)
    saved = f"Measurements.from_parquet({args.output!r})" if args.output else "rows"
    code = f"MemoryBudget.from_bytes({limit}, model=ProfiledMemory.fit({saved}), headroom={args.headroom})"
    options = {"headroom": args.headroom, "code": code, "new_tokens": new_tokens_of(workload)}
    title = f"{args.model}, {args.mode}, measured"
    return Fits.of(ProfiledMemory.fit(rows), limit, lengths, title=title, **options), rows


def _sizes(rows: Sequence[Any]) -> str:
    from dynagroup.plan.report import format_table

    gib = lambda size: "out of memory" if size is None else f"{size / 2**30:.3f}"  # noqa: E731
    sizes = [
        [f"{r.num_samples} x {r.longest['tokens']}", *map(gib, (r.static_bytes, r.batch_bytes, r.peak_bytes))]
        for r in rows
    ]
    return format_table(["samples x tokens", "static GiB", "batch GiB", "peak GiB"], sizes)


# demo


def demo(args: argparse.Namespace) -> None:
    from dynagroup.demo import DemoConfig, run_demo

    run_demo(
        DemoConfig(**{name: value for name, value in vars(args).items() if name != "command" and value is not None})
    )


DATA = "data --column --split --tokenizer --max-length"
TODAY = f"{DATA} --batch-size --accumulation --world-size --max-tokens --model --layout --pad-to-multiple-of --seed"
WORK = "--mode --dtype --autocast --max-new-tokens --gradient-checkpointing"
DEVICE = f"model --gpu-memory --headroom {WORK}"
PLAN = (
    "--max-tokens --batch-size --max-samples --layout --headroom --pad-to-multiple-of --world-size --shuffle --window"
)
DEMO = "--texts --tokenizer --model --budget --device --max-length --samples --seconds"
DEMO += " --samples-per-update --learning-rate --seed --picture --results"
COMMANDS = {
    "plan": Command(
        plan,
        "plan an epoch and show its figures",
        f"{DATA} {PLAN} --samples-per-update --seed --epoch --picture --json",
    ),
    "compare": Command(
        compare,
        "fixed batches, group_by_length and dynagroup on your lengths",
        f"{TODAY} --picture --json",
        ["--batch-size"],
    ),
    "doctor": Command(
        doctor,
        "what your batches waste, and what to change, in five lines",
        f"{TODAY} --gpu-memory {WORK} --json",
        ["--batch-size"],
    ),
    "fit": Command(
        fit,
        "how much of a model fits a device, and the line of code for it",
        f"{DEVICE} --layout --lora --fsdp --pad-to-multiple-of --lengths --picture --json",
        defaults={"gpu_memory": "80GB"},
    ),
    "profile": Command(
        profile,
        "how many samples of each length fit a device",
        f"{DEVICE} --shapes --measure --output --picture --json",
        defaults={"gpu_memory": "80GB", "picture": "profile.png"},
    ),
    "demo": Command(demo, "train a small model with fixed batches and with dynagroup", DEMO, defaults={"seed": None}),
}
