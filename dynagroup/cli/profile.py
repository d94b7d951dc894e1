"""``dynagroup profile``: how many samples of each length fit a device."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["add_arguments", "add_workload", "known"]


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
    parser.add_argument("--picture", metavar="PNG", type=Path, default=Path("profile.png"), help="default: %(default)s")
    parser.add_argument("--output", metavar="PARQUET", help="also save the rows")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
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
    memory: Any = import_module("dynagroup.memory")  # its names load when they are used
    from dynagroup.memory.profile import bytes_of, draw_profile, profile_lengths, profile_shapes, suggest
    from dynagroup.memory.trace.build import as_config

    gpu_memory, config = bytes_of(args.gpu_memory), as_config(args.model)
    workload = memory.Workload.from_model(config, args.mode, **known(args))
    shapes = [*args.shapes, *profile_shapes(config)]
    rows = _measure(config, workload, shapes) if args.measure else memory.simulate(config, workload, shapes)
    found, lengths = memory.ProfiledMemory.fit(rows), profile_lengths(config)
    title = f"{args.model}, {args.mode}, {rows.source}"
    text = suggest(found, gpu_memory, lengths, headroom=args.headroom, title=title)
    if args.json:
        print(json.dumps(_figures(found, lengths, gpu_memory, args.headroom), indent=1))
    elif args.shapes:
        print(_sizes(rows.rows[: len(args.shapes)]), text, sep="\n\n")
    else:
        print(text)
    if args.output:
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
        rows.to_parquet(args.output)
    args.picture.parent.mkdir(parents=True, exist_ok=True)
    draw_profile(found, gpu_memory, lengths[-1], args.picture, headroom=args.headroom)
    if not args.json:
        print(f"picture: {args.picture}")


def _figures(memory: Any, lengths: Sequence[int], gpu_memory: int, headroom: float) -> dict[str, Any]:
    import numpy as np

    most = memory.largest(np.array(lengths), headroom * gpu_memory).tolist()
    return {
        "device_bytes": gpu_memory,
        "headroom": headroom,
        "static_bytes": memory.static_bytes,
        "samples_that_fit": dict(zip(map(str, lengths), most, strict=True)),
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
