"""What the six commands find; their names and options are the package's."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from dynagroup.budget.memory import LENGTHS, MemoryBudget, parsed_bytes
from dynagroup.budget.tokens import TokenBudget
from dynagroup.cli.inputs import lengths_of
from dynagroup.device import CudaDevice
from dynagroup.errors import ConfigError
from dynagroup.memory import ProfiledMemory, Workload, measure
from dynagroup.memory.trace.model import as_config, as_random_model
from dynagroup.plan.cost import Work
from dynagroup.plan.plots import new_figure, save_picture
from dynagroup.plan.report import MEGA_BATCHES, Comparison
from dynagroup.plan.report import compare as compared
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.shapes import said

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORTH = 0.95  # predicted time, as a share of today's, above which nothing is worth a change
FEW = 32  # samples an update below which they leave little to sort
Found: TypeAlias = "tuple[Mapping[str, Any], object, Callable[[], Figure]]"
"""Figures for machines, the same for people, and what draws it."""


def run(args: argparse.Namespace) -> None:
    """Run a command and print what it found."""
    if args.command == "demo":  # prints as it goes
        return demo(args)
    find = {"plan": plan, "compare": compare, "doctor": doctor}.get(args.command, fit)
    figures, text, draw = find(args)
    print(json.dumps(figures, indent=1) if args.json else text)
    if vars(args).get("picture"):
        save_picture(draw(), args.picture)
        print(f"picture: {args.picture}", file=sys.stderr if args.json else sys.stdout)


def plan(args: argparse.Namespace) -> Found:
    lengths = lengths_of(args)
    budget = TokenBudget(args.max_tokens, pad_to_multiple_of=args.pad_to_multiple_of, layout=args.layout)
    options = {name: getattr(args, name) for name in ("shuffle", "window", "samples_per_update", "world_size")}
    found = LengthAwareBatchSampler(lengths, budget, rank=0, **options).plan
    return {**found.statistics, "fingerprint": found.fingerprint}, found.report(), found.plot


def compare(args: argparse.Namespace) -> Found:
    found = _comparison(args)
    return found.figures(), found.report(), found.plot


def _comparison(args: argparse.Namespace) -> Comparison:
    lengths = lengths_of(args)
    longest = max(sum(int(values.max()) for values in lengths.values()), 1)
    most = args.batch_size * longest if args.max_tokens is None else args.max_tokens
    budget = TokenBudget(most, layout=args.layout, pad_to_multiple_of=args.pad_to_multiple_of)
    work = None if args.model is None else Work.of(as_config(args.model))
    options = {"world_size": args.world_size, "accumulation": args.accumulation}
    return compared(lengths, args.batch_size, budget=budget, work=work, **options)


def doctor(args: argparse.Namespace) -> Found:
    """What is wasted, how long ranks wait, what memory does; what every way would take; and what to change."""
    found = _comparison(args)
    memory, safe = _memory(args, found)
    today, grouped = found.ways[:2]
    multiplied = f"of the tokens that {today.name} batches multiply are padding"
    waits = f"{found.world_size} ranks wait {today.waiting:.0%} of their time for the slowest of a step"
    findings = {
        "waste": f"{today.padding:.0%} {multiplied} (group_by_length: {grouped.padding:.0%})",
        "ranks": waits if found.world_size > 1 else "one rank: nobody waits",
        "memory": memory,
        "change": _change(found, args.layout, safe),
    }
    *first, last = (f"{name:6}  {text}" for name, text in findings.items())
    return {"findings": findings, **found.figures()}, "\n".join([*first, "", found.report(), "", last]), found.plot


def _change(found: Comparison, layout: str, safe: int | None) -> str:
    today, _, same, grouping, free = found.ways[:5]
    if min(same.time, grouping.time, free.time) > WORTH * today.time:
        return "nothing: lengths vary too little for other batches to pay"
    most, samples = getattr(found.budget, "max_tokens", today.largest_batch), found.samples_per_update
    packed = ', layout="packed"' if layout == "packed" else ""
    budget = f"TokenBudget({most if safe is None else min(most, max(safe, 1))}{packed})"
    loader = f"PlannedDataLoader(dataset, lengths, {budget}"
    if same.time > WORTH * today.time:
        few = f"{samples} samples an update are too few to sort: more of them, or updates as they come, {loader}), or"
        return f"{few} as many of similar samples, samples_per_update={samples}, grouping={MEGA_BATCHES}"
    few = f"; {samples} samples an update are few to sort, see grouping" if samples < FEW else ""
    return f"{loader}, samples_per_update={samples}); with the Trainer: dynagroup={budget}{few}"


def _memory(args: argparse.Namespace, found: Comparison) -> tuple[str, int | None]:
    """Whether as many samples as today fit the device with the longest of every stream, how many would, and a token budget
    that is safe: for samples as long in every stream as the longest of any, counting all streams."""
    if args.gpu_memory is None:
        today = found.ways[0]
        middle = int(sorted(today.plan.padded)[len(today.plan.padded) // 2])
        share = f"{middle / max(today.largest_batch, 1):.0%} of it"
        told = f"the largest batch has {today.largest_batch:,} tokens, a typical one {middle:,} ({share})"
        return f"{told}; name --model and --gpu-memory to see whether it fits", None
    if args.model is None:
        raise ConfigError("`--gpu-memory` needs `--model`, to know what a batch takes")
    longest = {name: max(int(values.max()), 1) for name, values in found.lengths.items()}
    budget = MemoryBudget.from_model(args.model, args.gpu_memory, **{**_workload(args), "layout": "padded"})
    most, safe = int(budget.most_samples(longest)[0]), budget.max_tokens(max(longest.values()))
    what = " and ".join(f"{units:,} {said(name)}" for name, units in longest.items())
    fits, end = ("fit", f", and {most} would") if most >= found.batch_size else ("do not fit", f": {most} do")
    answer = f"{found.batch_size} samples of {what} {fits} {args.gpu_memory}{end} ({budget.model})"
    return f"{answer}; a budget that is safe: {safe:,} tokens", safe


def _workload(args: argparse.Namespace) -> dict[str, Any]:
    """What was said about the work and differs from what is usual, as arguments of ``MemoryBudget.from_model``."""
    usual = {"mode": "train", "headroom": 0.9, "pad_to_multiple_of": 1, "layout": "padded"}
    names = (*usual, "dtype", "autocast", "gradient_checkpointing", "lora")
    told = {name: value for name in names if (value := vars(args).get(name)) and value != usual.get(name)}
    told |= {"max_new_tokens": args.max_new_tokens} if told.get("mode") == "generate" else {}
    return told | ({"sharding": "fsdp", "num_ranks": args.fsdp} if vars(args).get("fsdp") else {})


def fit(args: argparse.Namespace) -> Found:
    """What fits by the traced model, or by rows that are measured."""
    if vars(args).get("measure"):
        budget, code = _measured(args)
    else:
        how = _workload(args)
        budget = MemoryBudget.from_model(args.model, args.gpu_memory, **how)
        told = "".join(f", {name}={value!r}" for name, value in how.items())
        code = f"MemoryBudget.from_model({args.model!r}, {args.gpu_memory!r}{told})"
    found = budget.figures()
    return {**found, "code": code}, f"{budget}\n{code}", lambda: _curve(found, budget)


def _curve(found: Mapping[str, Any], budget: MemoryBudget) -> Figure:
    """Most samples over length, on log scales."""
    figure = new_figure(6, 3.6)
    axes = figure.subplots()
    axes.loglog(found["longest"], found["samples"], marker="o", nonpositive="mask")
    axes.set(xlabel="tokens of the longest sample", ylabel="samples that fit", title=budget.about.replace(" (", "\n("))
    return figure


def _measured(args: argparse.Namespace) -> tuple[MemoryBudget, str]:
    """What fits by rows measured on the CUDA device here."""
    device, limit = CudaDevice(), parsed_bytes(args.gpu_memory)  # refuses before a model is built
    config, about_plans = as_config(args.model), ("mode", "headroom", "pad_to_multiple_of")
    how = {name: value for name, value in _workload(args).items() if name not in about_plans}
    workload = Workload.from_model(config, args.mode, **how)
    most = getattr(config, "max_position_embeddings", None) or LENGTHS[-1]
    shapes = [(count, length) for length in LENGTHS if length <= most for count in (2, 8)]
    profile = ProfiledMemory.fit(measure(as_random_model(config, workload, device.device), workload, shapes))
    code = f"MemoryBudget.from_bytes({limit}, model=ProfiledMemory.fit(rows), headroom={args.headroom})"
    return MemoryBudget.from_bytes(limit, model=profile, headroom=args.headroom), code


def demo(args: argparse.Namespace) -> None:
    from dynagroup.demo import DemoConfig, run_demo

    told = {name: value for name, value in vars(args).items() if name != "command" and value is not None}
    run_demo(DemoConfig(**told))
