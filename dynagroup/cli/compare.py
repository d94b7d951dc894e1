"""``dynagroup compare``: what fixed batches, group_by_length and dynagroup make of the same lengths."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from dynagroup.cli.inputs import add_lengths, add_picture, check_picture, lengths_of, show_picture, show_streams, tokens

if TYPE_CHECKING:
    from dynagroup.plan.compare import Comparison
    from dynagroup.plan.work import Work

__all__ = ["add_arguments", "add_setting", "comparison_of"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_setting(parser)
    add_picture(parser)
    parser.set_defaults(run=run)


def add_setting(parser: argparse.ArgumentParser) -> None:
    """The arguments that say what a user's training is like today."""
    add_lengths(parser)
    parser.add_argument("--batch-size", type=int, required=True, metavar="N", help="samples of a batch on one rank")
    parser.add_argument(
        "--accumulation", type=int, default=1, metavar="N", help="such batches of an update (default: 1)"
    )
    parser.add_argument("--world-size", type=int, default=1, metavar="R", help="ranks (default: 1)")
    parser.add_argument(
        "--max-tokens", type=tokens, metavar="T", help="tokens that fit; default: batch size times the longest sample"
    )
    parser.add_argument("--model", metavar="NAME", help="a model's name or folder: predicts time for its sizes")
    parser.add_argument("--layout", choices=["padded", "packed"], default="padded", help="of dynagroup's batches")
    parser.add_argument("--pad-to-multiple-of", type=int, default=1, metavar="N")
    parser.add_argument("--seed", type=int, default=0)


def comparison_of(args: argparse.Namespace) -> Comparison:
    from dynagroup.budget.tokens import TokenBudget
    from dynagroup.plan.compare import compare

    lengths = lengths_of(args)
    longest = sum(int(values.max()) for values in lengths.values())
    most = args.batch_size * max(longest, 1) if args.max_tokens is None else args.max_tokens
    budget = TokenBudget(max(most, 1), layout=args.layout, pad_to_multiple_of=args.pad_to_multiple_of)
    return compare(
        lengths,
        args.batch_size,
        world_size=args.world_size,
        accumulation=args.accumulation,
        budget=budget,
        work=_work_of(args.model),
        seed=args.seed,
    )


def _work_of(model: str | None) -> Work | None:
    if model is None:
        return None
    from dynagroup.memory.trace.build import as_config
    from dynagroup.plan.work import Work

    return Work.of(as_config(model))


def run(args: argparse.Namespace) -> None:
    check_picture(args)
    found = comparison_of(args)
    show_streams(found.lengths, args)
    print(json.dumps(found.figures(), indent=1) if args.json else found.report())
    show_picture(found.plot, args)
