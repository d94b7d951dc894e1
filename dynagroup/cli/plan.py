"""``dynagroup plan``: an epoch as batches, before anything runs."""

from __future__ import annotations

import argparse
import json

from dynagroup.cli.inputs import (
    add_budget,
    add_lengths,
    add_picture,
    budget_of,
    check_picture,
    lengths_of,
    show_picture,
    show_streams,
)

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_lengths(parser)
    add_budget(parser)
    parser.add_argument("--world-size", type=int, default=1, metavar="R", help="ranks to plan for (default: 1)")
    parser.add_argument("--shuffle", action="store_true", help="other batches every epoch")
    parser.add_argument("--window", type=int, metavar="N", help="samples sorted together")
    parser.add_argument("--samples-per-update", type=int, metavar="N", help="exactly so many samples in each update")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epoch", type=int, default=0)
    add_picture(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from dynagroup.plan.sampler import LengthAwareBatchSampler

    check_picture(args)
    lengths = lengths_of(args)
    sampler = LengthAwareBatchSampler(
        lengths,
        budget_of(args),
        shuffle=args.shuffle,
        window=args.window,
        samples_per_update=args.samples_per_update,
        seed=args.seed,
        rank=0,
        world_size=args.world_size,
    )
    sampler.set_epoch(args.epoch)
    plan = sampler.plan
    show_streams(lengths, args)
    figures = {**plan.statistics, "fingerprint": plan.fingerprint}
    print(json.dumps(figures, indent=1) if args.json else plan.report())
    show_picture(plan.plot, args)
