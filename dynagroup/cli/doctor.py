"""``dynagroup doctor``: what a training wastes today, and what to change."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from dynagroup.cli.compare import add_setting, comparison_of
from dynagroup.cli.inputs import show_streams
from dynagroup.cli.profile import add_workload, known

if TYPE_CHECKING:
    from dynagroup.plan.compare import Comparison, Way

__all__ = ["add_arguments", "diagnosis"]

WORTH = 0.95  # predicted time, as a share of today's, above which nothing is worth a change


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_setting(parser)
    parser.add_argument("--gpu-memory", metavar="SIZE", help="such as 24GB: does the largest batch fit? Needs --model")
    add_workload(parser)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    found = comparison_of(args)
    show_streams(found.lengths, args)
    memory, safe = _memory(args, found)
    findings = diagnosis(found, memory, safe=safe, layout=args.layout)
    if args.json:
        print(json.dumps({"findings": findings, **found.figures()}, indent=1))
    else:
        width = max(map(len, findings))
        print("\n".join(f"{name.ljust(width)}  {text}" for name, text in findings.items()))


def diagnosis(
    found: Comparison, memory: str | None = None, *, safe: int | None = None, layout: str = "padded"
) -> dict[str, str]:
    """Five findings by name: what is wasted, how long ranks wait, what memory does, what to change, what that gives.

    Args:
        memory: what the device says. safe: tokens of a batch that fit it in any case.
    """
    today, same, free = found.ways[0], found.ways[2], found.ways[3]
    ranks = found.world_size
    return {
        "waste": f"{today.padding:.0%} of the tokens that {today.name} batches multiply are padding"
        f" (group_by_length: {found.ways[1].padding:.0%})",
        "ranks": f"{ranks} ranks wait {today.waiting:.0%} of their time for the slowest of a step"
        if ranks > 1
        else "one rank: nobody waits",
        "memory": memory or _spread(today),
        "change": _change(found, layout, safe),
        "gain": f"the same updates in {_share(same, today)} of the time ({same.padding:.0%} padding"
        + (f", {same.waiting:.0%} waiting" if ranks > 1 else "")
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
    today, same, free = found.ways[0], found.ways[2], found.ways[3]
    if min(same.time, free.time) > WORTH * today.time:
        return "nothing: lengths vary too little for other batches to pay"
    packed = ', layout="packed"' if layout == "packed" else ""
    tokens = getattr(found.budget, "max_tokens", today.largest_batch)
    budget = f"TokenBudget({tokens if safe is None else min(tokens, max(safe, 1))}{packed})"
    if same.time > WORTH * today.time:
        return (
            f"PlannedDataLoader(dataset, lengths, {budget}), updates as large as fit, or more samples an update (gradient "
            f"accumulation): {found.samples_per_update} are too few to sort"
        )
    how = f"samples_per_update={found.samples_per_update}"
    return f"PlannedDataLoader(dataset, lengths, {budget}, {how}); with the Trainer: dynagroup={budget}"


def _memory(args: argparse.Namespace, found: Comparison) -> tuple[str | None, int | None]:
    """Whether as many samples as today fit the device with the longest of every stream, and how many would.

    The token budget is one for samples that are as long in every stream as the longest of any; it counts all streams, so
    that it is safe for any of these.
    """
    from dynagroup.errors import ConfigError

    if args.gpu_memory is None:
        return None, None
    if args.model is None:
        raise ConfigError("`--gpu-memory` needs `--model`, to know what a batch takes")
    from dynagroup.memory.fits import what_fits
    from dynagroup.shapes import said

    longest = {name: max(int(values.max()), 1) for name, values in found.lengths.items()}
    fits = what_fits(
        args.model,
        args.gpu_memory,
        mode=args.mode,
        lengths=[max(longest.values())],
        pad_to_multiple_of=args.pad_to_multiple_of,
        **known(args),
    )
    most = fits.most_samples(longest)
    what = " and ".join(f"{units:,} {said(name)}" for name, units in longest.items())
    answer = (
        f"do not fit {args.gpu_memory}: {most} do"
        if most < found.batch_size
        else f"fit {args.gpu_memory}, and {most} would"
    )
    told = f"{found.batch_size} samples of {what} {answer} ({fits.assumes}); a budget that is safe: {fits.max_tokens:,} tokens"
    return told, fits.max_tokens
