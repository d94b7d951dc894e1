"""``dynagroup demo``: the same training twice, with fixed batches and with dynagroup."""

from __future__ import annotations

import argparse

from dynagroup.cli.inputs import tokens

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("--budget", type=tokens, help="tokens a batch may have, padding counted")
    parser.add_argument("--device", help="cpu, cuda, ...; default: cuda if there is one")
    parser.add_argument("--max-length", type=tokens, help="tokens that a text is truncated to")
    parser.add_argument("--samples", type=int, help="texts to train on, if there is time")
    parser.add_argument("--seconds", type=float, help="training stops after so long, in both runs at the same update")
    parser.add_argument("--samples-per-update", type=int, help="texts in one optimizer update")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--picture", metavar="PNG", help="where the picture is saved")
    parser.add_argument("--results", metavar="JSON", help="where the figures are saved")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from dynagroup.demo import DemoConfig, run_demo

    given = {name: value for name, value in vars(args).items() if name not in ("command", "run") and value is not None}
    run_demo(DemoConfig(**given))
