"""``dynagroup fit``: how much of a model fits a device, and the line of code that decides the same."""

from __future__ import annotations

import argparse
import json
from typing import Any

from dynagroup.cli.inputs import add_picture, check_picture, show_picture, tokens
from dynagroup.cli.profile import add_workload, figure_of, known

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a model's name, or a folder with a config.json; no weights are read")
    parser.add_argument("--gpu-memory", default="80GB", metavar="SIZE", help="such as 24GB (default: %(default)s)")
    parser.add_argument("--headroom", type=float, default=0.9, help="share of it to use (default: %(default)s)")
    parser.add_argument("--layout", choices=["padded", "packed"], default="padded")
    parser.add_argument("--lora", action="store_true", help="adapters are trained, the model is frozen")
    parser.add_argument("--fsdp", type=int, metavar="R", help="parameters, gradients and optimizer spread over R ranks")
    add_workload(parser)
    parser.add_argument("--pad-to-multiple-of", type=int, default=1, metavar="N")
    parser.add_argument(
        "--lengths", nargs="+", type=tokens, metavar="T", help="tokens of the longest sample: 512 2k 8k"
    )
    add_picture(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from dynagroup.memory.fits import what_fits

    check_picture(args)
    found = what_fits(
        args.model,
        args.gpu_memory,
        mode=args.mode,
        headroom=args.headroom,
        pad_to_multiple_of=args.pad_to_multiple_of,
        lengths=args.lengths,
        **_how(args),
    )
    print(json.dumps(_figures(found), indent=1) if args.json else found)
    show_picture(lambda: figure_of(found), args)


def _how(args: argparse.Namespace) -> dict[str, Any]:
    said: dict[str, Any] = {"layout": None if args.layout == "padded" else args.layout, "lora": args.lora or None}
    if args.fsdp is not None:
        said |= {"sharding": "fsdp", "num_ranks": args.fsdp}
    return {**known(args), **{name: value for name, value in said.items() if value is not None}}


def _figures(found: Any) -> dict[str, Any]:
    return {
        "limit_bytes": found.limit_bytes,
        "headroom": found.headroom,
        "static_bytes": found.memory.static_bytes,
        "max_tokens": found.max_tokens,
        "new_tokens": found.new_tokens,
        "samples": dict(zip(map(str, found.lengths), found.samples, strict=True)),
        "code": found.code,
    }
