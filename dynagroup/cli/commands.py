"""The six commands: which options each takes, and what it finds. Pictures are asked for before the work they show."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from dynagroup.cli.inputs import lengths_of
from dynagroup.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dynagroup.budget.memory import MemoryBudget
    from dynagroup.plan.report import Comparison
    from dynagroup.shapes import Streams

WORTH = 0.95
"""Predicted time, as a share of today's, above which nothing is worth a change."""
Found: TypeAlias = "tuple[Mapping[str, Any], object, Callable[[], Figure]]"
"""Figures for machines, the same for people, and what draws it."""


@dataclass(frozen=True)
class Command:
    """One command: what it does, the names of its options, and where it differs from their defaults."""

    find: Callable[[argparse.Namespace], Found | None]
    does: str
    options: str
    required: Sequence[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)


def run(args: argparse.Namespace) -> None:
    """Run a command and print what it found."""
    from dynagroup.plan.plots import save_picture

    found = COMMANDS[args.command].find(args)
    if found is None:  # the demo prints as it goes
        return
    figures, text, draw = found
    print(json.dumps(figures, indent=1) if args.json else text)
    if vars(args).get("picture"):
        save_picture(draw(), args.picture)
        print(f"picture: {args.picture}", file=sys.stderr if args.json else sys.stdout)


def _show_streams(args: argparse.Namespace, streams: Streams) -> None:
    """Say which streams were found, where there are several; beside the output where machines read that."""
    from dynagroup.shapes import said

    if len(streams) > 1:
        names = ", ".join(map(said, streams))
        line = f"streams: {names} (a batch holds the tokens of all; to take others: --column NAME[,NAME])"
        print(line, file=sys.stderr if args.json else sys.stdout)


def plan(args: argparse.Namespace) -> Found:
    from dynagroup.budget.tokens import TokenBudget
    from dynagroup.plan.sampler import LengthAwareBatchSampler

    lengths = lengths_of(args)
    budget = TokenBudget(args.max_tokens, pad_to_multiple_of=args.pad_to_multiple_of, layout=args.layout)
    options = {name: getattr(args, name) for name in ("shuffle", "window", "samples_per_update", "world_size")}
    found = LengthAwareBatchSampler(lengths, budget, rank=0, **options).plan
    _show_streams(args, lengths)
    return {**found.statistics, "fingerprint": found.fingerprint}, found.report(), found.plot


def compare(args: argparse.Namespace) -> Found:
    found = _comparison(args)
    return found.figures(), found.report(), found.plot


def _comparison(args: argparse.Namespace) -> Comparison:
    from dynagroup.budget.tokens import TokenBudget
    from dynagroup.memory.trace.model import as_config
    from dynagroup.plan.cost import Work
    from dynagroup.plan.report import compare

    lengths = lengths_of(args)
    longest = max(sum(int(values.max()) for values in lengths.values()), 1)
    most = args.batch_size * longest if args.max_tokens is None else args.max_tokens
    budget = TokenBudget(most, layout=args.layout, pad_to_multiple_of=args.pad_to_multiple_of)
    work = None if args.model is None else Work.of(as_config(args.model))
    options = {"world_size": args.world_size, "accumulation": args.accumulation}
    found = compare(lengths, args.batch_size, budget=budget, work=work, **options)
    _show_streams(args, lengths)
    return found


def doctor(args: argparse.Namespace) -> Found:
    """Five findings by name: what is wasted, how long ranks wait, what memory does, what to change, what that gives."""
    found = _comparison(args)
    memory, safe = _memory(args, found)
    today, grouped, same, free = found.ways[:4]
    waits = f"{found.world_size} ranks wait {today.waiting:.0%} of their time for the slowest of a step"
    findings = {
        "waste": f"{today.padding:.0%} of the tokens that {today.name} batches multiply are padding"
        f" (group_by_length: {grouped.padding:.0%})",
        "ranks": waits if found.world_size > 1 else "one rank: nobody waits",
        "memory": memory,
        "change": _change(found, args.layout, safe),
        "gain": f"the same updates in {same.time / max(today.time, 1e-9):.2f} of the time ({same.padding:.0%} padding, "
        f"{same.waiting:.0%} waiting); updates as large as fit, shuffle=True: {free.time / max(today.time, 1e-9):.2f}",
    }
    report = "\n".join(f"{name:6}  {text}" for name, text in findings.items())
    return {"findings": findings, **found.figures()}, report, found.plot


def _change(found: Comparison, layout: str, safe: int | None) -> str:
    today, _, same, free = found.ways[:4]
    if min(same.time, free.time) > WORTH * today.time:
        return "nothing: lengths vary too little for other batches to pay"
    most = getattr(found.budget, "max_tokens", today.largest_batch)
    packed = ', layout="packed"' if layout == "packed" else ""
    budget = f"TokenBudget({most if safe is None else min(most, max(safe, 1))}{packed})"
    samples = found.samples_per_update
    if same.time > WORTH * today.time:
        return (
            f"PlannedDataLoader(dataset, lengths, {budget}), or more samples an update: {samples} are too few to sort"
        )
    return f"PlannedDataLoader(dataset, lengths, {budget}, samples_per_update={samples}); with the Trainer: dynagroup={budget}"


def _memory(args: argparse.Namespace, found: Comparison) -> tuple[str, int | None]:
    """Whether as many samples as today fit the device with the longest of every stream, how many would, and a token budget
    that is safe: for samples as long in every stream as the longest of any, counting all streams."""
    from dynagroup.budget.memory import MemoryBudget
    from dynagroup.shapes import said

    if args.gpu_memory is None:
        today = found.ways[0]
        middle = int(sorted(today.padded)[len(today.padded) // 2])
        return (
            f"the largest batch has {today.largest_batch:,} tokens, a typical one {middle:,} "
            f"({middle / max(today.largest_batch, 1):.0%} of it); name --model and --gpu-memory to see whether it fits"
        ), None
    if args.model is None:
        raise ConfigError("`--gpu-memory` needs `--model`, to know what a batch takes")
    longest = {name: max(int(values.max()), 1) for name, values in found.lengths.items()}
    options = {"mode": args.mode, "pad_to_multiple_of": args.pad_to_multiple_of, **_workload(args)}
    budget = MemoryBudget.from_model(args.model, args.gpu_memory, **options)
    most, tokens = int(budget.most_samples(longest)[0]), budget.max_tokens(max(longest.values()))
    what = " and ".join(f"{units:,} {said(name)}" for name, units in longest.items())
    too_many = f"do not fit {args.gpu_memory}: {most} do"
    answer = too_many if most < found.batch_size else f"fit {args.gpu_memory}, and {most} would"
    return (
        f"{found.batch_size} samples of {what} {answer} ({budget.model}); a budget that is safe: {tokens:,} tokens",
        tokens,
    )


def _workload(args: argparse.Namespace) -> dict[str, Any]:
    """What was said about the work, as arguments of ``Workload.from_model``; ``doctor`` and ``profile`` ask for less."""
    asked = vars(args)
    told = {name: asked.get(name) for name in ("dtype", "autocast", "gradient_checkpointing", "lora")}
    told["max_new_tokens"] = args.max_new_tokens if args.mode == "generate" else None
    if args.command == "fit":
        told["layout"] = "packed" if args.layout == "packed" else None
        told |= {"sharding": "fsdp", "num_ranks": args.fsdp} if args.fsdp is not None else {}
    return {name: value for name, value in told.items() if value}


def fit(args: argparse.Namespace) -> Found:
    """What fits by the traced model, or by rows that are measured."""
    from dynagroup.budget.memory import MemoryBudget

    asked, usual = vars(args), {"mode": "train", "headroom": 0.9, "pad_to_multiple_of": 1}
    if asked.get("measure"):
        budget, code = _measured(args)
    else:
        how = {name: asked[name] for name in usual if name in asked} | _workload(args)
        budget = MemoryBudget.from_model(args.model, args.gpu_memory, **how)
        told = "".join(f", {name}={value!r}" for name, value in how.items() if value != usual.get(name))
        code = f"MemoryBudget.from_model({args.model!r}, {args.gpu_memory!r}{told})"
    found = budget.figures(asked.get("lengths"))
    text = f"{budget.about}\n{budget.table(asked.get('lengths'))}\n{code}"
    return {**found, "code": code}, text, lambda: _curve(found, budget)


def _curve(found: Mapping[str, Any], budget: MemoryBudget) -> Figure:
    """Most samples over length, on log scales."""
    from dynagroup.plan.plots import new_figure

    figure = new_figure(6, 3.6)
    axes = figure.subplots()
    axes.loglog(found["longest"], found["samples"], marker="o", nonpositive="mask")
    axes.set(xlabel="tokens of the longest sample", ylabel="samples that fit", title=budget.about.replace(" (", "\n("))
    return figure


def _measured(args: argparse.Namespace) -> tuple[MemoryBudget, str]:
    """What fits by rows measured on the CUDA device here."""
    from dynagroup.budget.memory import LENGTHS, MemoryBudget, parsed_bytes
    from dynagroup.device import CudaDevice
    from dynagroup.memory import ProfiledMemory, Workload, measure
    from dynagroup.memory.trace.model import as_config, as_random_model

    device, limit = CudaDevice(), parsed_bytes(args.gpu_memory)  # refuses before a model is built
    config = as_config(args.model)
    workload = Workload.from_model(config, args.mode, **_workload(args))
    most = getattr(config, "max_position_embeddings", None) or LENGTHS[-1]
    shapes = [(count, length) for length in LENGTHS if length <= most for count in (2, 8)]
    profile = ProfiledMemory.fit(measure(as_random_model(config, workload, device.device), workload, shapes))
    code = f"MemoryBudget.from_bytes({limit}, model=ProfiledMemory.fit(rows), headroom={args.headroom})"
    return MemoryBudget.from_bytes(limit, model=profile, headroom=args.headroom), code


def demo(args: argparse.Namespace) -> None:
    from dynagroup.demo import DemoConfig, run_demo

    told = {name: value for name, value in vars(args).items() if name != "command" and value is not None}
    run_demo(DemoConfig(**told))


DATA = "data --column --tokenizer --max-length --world-size --max-tokens --layout --pad-to-multiple-of --json"
TODAY = f"{DATA} --batch-size --accumulation --model"
DEVICE = (
    "model --gpu-memory --headroom --mode --dtype --autocast --max-new-tokens --gradient-checkpointing --picture --json"
)
FIT = f"{DEVICE} --layout --lora --fsdp --pad-to-multiple-of --lengths"
DEMO = "--texts --tokenizer --model --device --budget --max-length --samples --seconds"
AT_80 = {"gpu_memory": "80GB"}
WAYS = "fixed batches, group_by_length and dynagroup on your lengths"
WASTE = "what your batches waste, and what to change, in five lines"
COMMANDS = {
    "plan": Command(
        plan,
        "plan an epoch and show its figures",
        f"{DATA} --shuffle --window --samples-per-update --picture",
        ["--max-tokens"],
    ),
    "compare": Command(compare, WAYS, f"{TODAY} --picture", ["--batch-size"]),
    "doctor": Command(doctor, WASTE, f"{TODAY} --gpu-memory --dtype --gradient-checkpointing", ["--batch-size"]),
    "fit": Command(fit, "how much of a model fits a device, and the line of code for it", FIT, defaults=AT_80),
    "profile": Command(
        fit,
        "how many samples of each length fit a device",
        f"{DEVICE} --measure",
        defaults={**AT_80, "picture": "profile.png"},
    ),
    "demo": Command(demo, "train a small model with fixed batches and with dynagroup", DEMO),
}
