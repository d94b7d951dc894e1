"""The command line: ``dynagroup plan``, ``dynagroup profile``, ``dynagroup demo``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from dynagroup.errors import AlignmentError, BudgetError, ConfigError, StateError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit status.

    A user's mistake is printed as one line, with status 2.
    """
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        args.run(args)
    except (AlignmentError, BudgetError, ConfigError, StateError) as error:
        print(f"dynagroup {args.command}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if not error.name or error.name.startswith("dynagroup"):
            raise
        print(f"dynagroup {args.command} needs the package {error.name}: install dynagroup[hf,viz]", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dynagroup", description="Batches that fit.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_plan(commands.add_parser("plan", help="plan an epoch for given lengths and show its figures"))
    _add_profile(commands.add_parser("profile", help="how many samples of each length fit a device"))
    _add_demo(commands.add_parser("demo", help="train a small model with fixed batches and with dynagroup"))
    return parser


def _add_plan(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--lengths", metavar="FILE", help=".npy; .npz (streams by name); or text, one length a line")
    source.add_argument("--texts", metavar="FILE", help="one text a line; needs --tokenizer")
    parser.add_argument("--tokenizer", metavar="NAME", help="name or folder of a transformers tokenizer")
    parser.add_argument("--max-length", type=int, help="tokens that texts and lengths are truncated to")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--max-tokens", type=int, help="tokens a batch may have, padding counted")
    size.add_argument("--batch-size", type=int, help="samples of the hardest batch; memory is predicted for the others")
    parser.add_argument("--max-samples", type=int, help="samples a batch may have (with --max-tokens)")
    parser.add_argument("--layout", choices=["padded", "packed"], default="padded", help="with --max-tokens")
    parser.add_argument("--headroom", type=float, default=0.9, help="with --batch-size (default: %(default)s)")
    parser.add_argument("--pad-to-multiple-of", type=int, default=1)
    parser.add_argument("--world-size", type=int, default=1, help="ranks to plan for (default: %(default)s)")
    parser.add_argument("--shuffle", action="store_true", help="other batches every epoch")
    parser.add_argument("--window", type=int, help="samples sorted together")
    parser.add_argument("--samples-per-update", type=int, help="exactly so many samples in each optimizer update")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epoch", type=int, default=0)
    parser.add_argument("--plot", metavar="PNG", help="also save a picture")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run=_plan)


def _plan(args: argparse.Namespace) -> None:
    from dynagroup.plan.sampler import LengthAwareBatchSampler

    sampler = LengthAwareBatchSampler(
        _lengths(args),
        _budget(args),
        shuffle=args.shuffle,
        window=args.window,
        samples_per_update=args.samples_per_update,
        seed=args.seed,
        rank=0,
        world_size=args.world_size,
    )
    sampler.set_epoch(args.epoch)
    plan = sampler.plan
    figures = {**plan.statistics, "fingerprint": plan.fingerprint}
    print(json.dumps(figures, indent=1) if args.json else plan.report())
    if args.plot:
        plan.plot().savefig(args.plot, dpi=110)


def _lengths(args: argparse.Namespace) -> Any:
    import numpy as np

    from dynagroup.lengths import as_streams

    if args.texts:
        return _measured(args)
    path = Path(args.lengths)
    if not path.exists():
        raise ConfigError(f"`--lengths` names no file: {path}")
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            streams = dict(as_streams({name: arrays[name] for name in arrays.files}))
    elif path.suffix == ".npy":
        streams = dict(as_streams(np.load(path)))
    else:
        streams = dict(as_streams(np.loadtxt(path, ndmin=1)))
    if args.max_length is not None:
        streams["tokens"] = np.minimum(streams["tokens"], np.int32(args.max_length))
    return streams


def _measured(args: argparse.Namespace) -> Any:
    from dynagroup.lengths import measure_lengths

    if not args.tokenizer:
        raise ConfigError("`--texts` needs `--tokenizer`, to know how long the texts are")
    from transformers import AutoTokenizer

    texts = Path(args.texts).read_text(encoding="utf-8").splitlines()
    return measure_lengths(texts, AutoTokenizer.from_pretrained(args.tokenizer), max_length=args.max_length)


def _budget(args: argparse.Namespace) -> Any:
    from dynagroup.budget.memory import MemoryBudget
    from dynagroup.budget.tokens import TokenBudget

    if args.max_tokens is not None:
        return TokenBudget(
            args.max_tokens,
            max_samples=args.max_samples,
            pad_to_multiple_of=args.pad_to_multiple_of,
            layout=args.layout,
        )
    return MemoryBudget(args.batch_size, headroom=args.headroom, pad_to_multiple_of=args.pad_to_multiple_of)


def _add_profile(parser: argparse.ArgumentParser) -> None:
    parser.description = "How many samples of each length fit a device, and which batch_size to begin with."
    parser.add_argument("model", help="a model's name, or a folder with a config.json; no weights are read")
    parser.add_argument("--gpu-memory", default="80GB", help="such as 80GB or 24GiB (default: %(default)s)")
    parser.add_argument("--headroom", type=float, default=0.9, help="share of it to use (default: %(default)s)")
    parser.add_argument("--mode", choices=["train", "forward", "generate"], default="train")
    parser.add_argument("--dtype", help="of the parameters, e.g. bfloat16; default: the model's")
    parser.add_argument("--autocast", help="lower precision of torch.autocast, e.g. bfloat16; default: not used")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="with --mode generate (default: %(default)s)")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument(
        "--shapes", nargs="+", default=[], metavar="NxL", type=_shape, help="also show samples x tokens, e.g. 8x512"
    )
    parser.add_argument(
        "--measure", action="store_true", help="run random weights on the CUDA device here; default: simulate"
    )
    parser.add_argument("--picture", metavar="PNG", type=Path, default=Path("profile.png"), help="default: %(default)s")
    parser.add_argument("--output", metavar="PARQUET", help="also save the rows")
    parser.set_defaults(run=_profile)


def _shape(text: str) -> tuple[int, int]:
    samples, found, longest = text.partition("x")
    if not (found and samples.isdigit() and longest.isdigit()):
        raise argparse.ArgumentTypeError(f"must be samples x tokens, such as 8x512, but is {text!r}")
    return int(samples), int(longest)


def _profile(args: argparse.Namespace) -> None:
    memory: Any = import_module("dynagroup.memory")  # its names load when they are used
    from dynagroup.memory.profile import bytes_of, draw_profile, profile_lengths, profile_shapes, suggest
    from dynagroup.memory.trace.build import as_config

    gpu_memory, config = bytes_of(args.gpu_memory), as_config(args.model)
    workload = memory.Workload.from_model(config, args.mode, **_known(args))
    shapes = [*args.shapes, *profile_shapes(config)]
    rows = _measure(config, workload, shapes) if args.measure else memory.simulate(config, workload, shapes)
    if args.shapes:
        print(_sizes(rows.rows[: len(args.shapes)]), end="\n\n")
    if args.output:
        rows.to_parquet(args.output)
    found, lengths = memory.ProfiledMemory.fit(rows), profile_lengths(config)
    title = f"{args.model}, {args.mode}, {rows.source}"
    print(suggest(found, gpu_memory, lengths, headroom=args.headroom, title=title))
    draw_profile(found, gpu_memory, lengths[-1], args.picture, headroom=args.headroom)
    print(f"picture: {args.picture}")


def _known(args: argparse.Namespace) -> dict[str, Any]:
    known = {"dtype": args.dtype, "autocast": args.autocast, "gradient_checkpointing": args.gradient_checkpointing}
    if args.mode == "generate":
        known["max_new_tokens"] = args.max_new_tokens
    return {name: value for name, value in known.items() if value is not None}


def _measure(config: Any, workload: Any, shapes: Sequence[tuple[int, int]]) -> Any:
    from dynagroup.memory import measure
    from dynagroup.memory.trace.build import as_random_model
    from dynagroup.memory.trace.measure import CudaDevice

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


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a small language model on real texts with fixed batches and with dynagroup, and compare."
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--texts", metavar="FILE", help="one text a line; default: docstrings found on this machine")
    source.add_argument("--dataset", metavar="NAME", help="a dataset for datasets.load_dataset; needs --column")
    parser.add_argument("--column", metavar="C", help="the dataset's column of texts")
    parser.add_argument("--split", help="the dataset's split")
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="a transformers tokenizer; default: one trained on the texts"
    )
    parser.add_argument("--model", metavar="NAME", help="a transformers causal language model; default: a small Llama")
    parser.add_argument("--budget", type=int, help="tokens a batch may have, padding counted")
    parser.add_argument("--device", help="cpu, cuda, ...; default: cuda if there is one")
    parser.add_argument("--max-length", type=int, help="tokens that a text is truncated to")
    parser.add_argument("--samples", type=int, help="texts to train on, if there is time")
    parser.add_argument("--seconds", type=float, help="training stops after so long, in both runs at the same update")
    parser.add_argument("--samples-per-update", type=int, help="texts in one optimizer update")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--picture", metavar="PNG", help="where the picture is saved")
    parser.add_argument("--results", metavar="JSON", help="where the figures are saved")
    parser.set_defaults(run=_demo)


def _demo(args: argparse.Namespace) -> None:
    from dynagroup.demo import DemoConfig, run_demo

    given = {name: value for name, value in vars(args).items() if name not in ("command", "run") and value is not None}
    run_demo(DemoConfig(**given))
