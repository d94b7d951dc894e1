"""``dynagroup profile``: how many samples of each length fit a device."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynagroup.cli.inputs import add_picture, check_picture, show_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["add_arguments", "add_workload", "figure_of", "known"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "How many samples of each length fit a device, and which batch_size to begin with."
    parser.add_argument("model", help="a model's name, or a folder with a config.json; no weights are read")
    parser.add_argument("--gpu-memory", default="80GB", help="such as 80GB or 24GiB (default: %(default)s)")
    parser.add_argument("--headroom", type=float, default=0.9, help="share of it to use (default: %(default)s)")
    add_workload(parser)
    parser.add_argument(
        "--shapes", nargs="+", default=[], metavar="NxL", type=_shape, help="also show samples x tokens, e.g. 8x512"
    )
    parser.add_argument(
        "--measure", action="store_true", help="run random weights on the CUDA device here; default: simulate"
    )
    parser.add_argument("--output", metavar="PARQUET", help="also save the rows")
    add_picture(parser, default="profile.png")
    parser.set_defaults(run=run)


def add_workload(parser: argparse.ArgumentParser) -> None:
    """The arguments that say what is done with the model."""
    parser.add_argument("--mode", choices=["train", "forward", "generate"], default="train")
    parser.add_argument("--dtype", help="of the parameters, e.g. bfloat16; default: the model's")
    parser.add_argument("--autocast", help="lower precision of torch.autocast, e.g. bfloat16; default: not used")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="with --mode generate (default: %(default)s)")
    parser.add_argument("--gradient-checkpointing", action="store_true")


def known(args: argparse.Namespace) -> dict[str, Any]:
    """What was said about the work, as arguments of ``Workload.from_model``."""
    said = {
        "dtype": args.dtype,
        "autocast": args.autocast,
        "gradient_checkpointing": args.gradient_checkpointing or None,
    }
    if args.mode == "generate":
        said["max_new_tokens"] = args.max_new_tokens
    return {name: value for name, value in said.items() if value is not None}


def _shape(text: str) -> tuple[int, int]:
    samples, found, longest = text.partition("x")
    if not (found and samples.isdigit() and longest.isdigit()):
        raise argparse.ArgumentTypeError(f"must be samples x tokens, such as 8x512, but is {text!r}")
    return int(samples), int(longest)


def run(args: argparse.Namespace) -> None:
    from dynagroup.memory import Fits, Measurements, ProfiledMemory, Workload, simulate, what_fits
    from dynagroup.memory.fits import new_tokens_of, parsed_bytes, usual_lengths
    from dynagroup.memory.trace.build import as_config

    check_picture(args)
    gpu_memory, config = parsed_bytes(args.gpu_memory), as_config(args.model)
    rows: Measurements | None = None
    if args.measure:
        lengths = usual_lengths(config)
        workload = Workload.from_model(config, args.mode, **known(args))
        rows = measured = _measure(
            config, workload, [*args.shapes, *((n, length) for length in lengths for n in (2, 8))]
        )
        saved = f"Measurements.from_parquet({args.output!r})" if args.output else "rows"
        found = Fits.of(
            ProfiledMemory.fit(measured),
            gpu_memory,
            lengths,
            headroom=args.headroom,
            code=f"MemoryBudget.from_bytes({gpu_memory}, model=ProfiledMemory.fit({saved}), headroom={args.headroom})",
            title=f"{args.model}, {args.mode}, measured",
            new_tokens=new_tokens_of(workload),
        )
    else:
        found = what_fits(args.model, args.gpu_memory, mode=args.mode, headroom=args.headroom, **known(args))
        workload = found.memory.workload  # type: ignore[attr-defined]
        if args.shapes or args.output:
            rows = simulate(
                config, workload, args.shapes or [(count, length) for length, count, *_ in found.rows() if count]
            )
    if args.json:
        print(json.dumps(_figures(found), indent=1))
    elif args.shapes and rows is not None:
        print(_sizes(rows.rows[: len(args.shapes)]), found, sep="\n\n")
    else:
        print(found)
    if args.output and rows is not None:
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
        rows.to_parquet(args.output)
    show_picture(lambda: figure_of(found), args)


def figure_of(found: Any) -> Figure:
    """What fits, as a curve."""
    from dynagroup.plan.pictures import new_figure

    figure = new_figure(6, 3.6)
    found.draw(figure.subplots())
    return figure


def _figures(found: Any) -> dict[str, Any]:
    return {
        "device_bytes": found.limit_bytes,
        "headroom": found.headroom,
        "static_bytes": found.memory.static_bytes,
        "samples_that_fit": dict(zip(map(str, found.lengths), found.samples, strict=True)),
        "max_tokens": found.max_tokens,
        "new_tokens": found.new_tokens,
    }


def _measure(config: Any, workload: Any, shapes: Sequence[tuple[int, int]]) -> Any:
    from dynagroup.device import CudaDevice
    from dynagroup.memory import measure
    from dynagroup.memory.trace.build import as_random_model

    device = CudaDevice()  # refuses before a model is built
    return measure(as_random_model(config, workload, device.device), workload, shapes, device=device)


def _sizes(rows: Sequence[Any]) -> str:
    from dynagroup.plan.report import format_table

    sizes = [
        [
            f"{row.num_samples} x {row.longest['tokens']}",
            *map(_gib, (row.static_bytes, row.batch_bytes, row.peak_bytes)),
        ]
        for row in rows
    ]
    return format_table(["samples x tokens", "static GiB", "batch GiB", "peak GiB"], sizes)


def _gib(size: int | None) -> str:
    return "out of memory" if size is None else f"{size / 2**30:.3f}"
