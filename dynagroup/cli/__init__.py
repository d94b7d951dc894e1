"""The command line: ``dynagroup plan | compare | doctor | fit | profile | demo``. ``commands`` does, ``inputs`` reads."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import dynagroup
from dynagroup.cli.commands import COMMANDS
from dynagroup.cli.inputs import KINDS, tokens
from dynagroup.errors import AlignmentError, BudgetError, ConfigError, StateError

__all__ = ["main"]

# A hub that cannot be reached is told once, by our own error; a text longer than a model takes is no news where lengths are
# what is asked for.
QUIET = ("huggingface_hub.utils._http", "transformers.tokenization_utils_base")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit status.

    A user's mistake is printed as one line, with status 2.
    """
    args = _parser().parse_args(arguments)
    try:
        with _in_lines(args.command):
            COMMANDS[args.command].run(args)
    except (AlignmentError, BudgetError, ConfigError, StateError) as error:
        return _failed(args.command, str(error))
    except OSError as error:  # a file that cannot be written, a model's name that leads nowhere
        return _failed(args.command, (str(error).strip().splitlines() or [repr(error)])[0])
    except ModuleNotFoundError as error:
        if not error.name or error.name.startswith("dynagroup"):
            raise
        return _failed(args.command, f"the package {error.name} is missing: install dynagroup[hf,viz,parquet]")
    except KeyboardInterrupt:
        return 130
    return 0


@contextmanager
def _in_lines(command: str) -> Iterator[None]:
    """Warnings are a line each."""
    loggers = [logging.getLogger(name) for name in QUIET]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: _say(command, f"warning: {message}")
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _say(command: str, message: str) -> None:
    print(f"dynagroup {command}: {' '.join(message.split())}", file=sys.stderr)


def _failed(command: str, message: str) -> int:
    _say(command, message)
    return 2


def _shape(text: str) -> tuple[int, int]:
    samples, found, longest = text.partition("x")
    if not (found and samples.isdigit() and longest.isdigit()):
        raise argparse.ArgumentTypeError(f"must be samples x tokens, such as 8x512, but is {text!r}")
    return int(samples), int(longest)


def _text(metavar: str | None, text: str | None = None, **options: Any) -> dict[str, Any]:
    return {"metavar": metavar, "help": text, **options}


def _number(metavar: str, text: str | None = None, kind: Callable[[str], Any] = int, **options: Any) -> dict[str, Any]:
    return {"metavar": metavar, "help": text, "type": kind, **options}


def _switch(text: str) -> dict[str, Any]:
    return {"action": "store_true", "help": text}


OPTIONS: dict[str, dict[str, Any]] = {
    "data": _text("DATA", f"lengths, token ids or texts: {KINDS}"),
    "model": _text("MODEL", "a model's name, or a folder with a config.json; no weights are read"),
    "--column": _text(
        "C[,C]",
        "of a table or .npz: lengths, ids or (with --tokenizer) texts; several are padded streams, such as source,target",
    ),
    "--split": _text("S", "of a folder saved by datasets (default: train)"),
    "--tokenizer": _text("NAME", "transformers tokenizer: DATA then holds texts"),
    "--max-length": _number("T", "tokens that longer samples are truncated to", tokens),
    "--max-tokens": _number(
        "T", "tokens a batch may have, padding counted: 16k; else by --batch-size: times the longest sample", tokens
    ),
    "--batch-size": _number("N", "samples of a batch on one rank; in plan: of the hardest batch, known to fit"),
    "--max-samples": _number("N", "samples a batch may have (with --max-tokens)"),
    "--layout": _text(None, "of dynagroup's batches", choices=["padded", "packed"], default="padded"),
    "--headroom": _number("H", "share of the memory to use (default: %(default)s)", float, default=0.9),
    "--pad-to-multiple-of": _number("N", default=1),
    "--accumulation": _number("N", "such batches of an update (default: 1)", default=1),
    "--world-size": _number("R", "ranks (default: 1)", default=1),
    "--shuffle": _switch("other batches every epoch"),
    "--window": _number("N", "samples sorted together"),
    "--samples-per-update": _number("N", "exactly so many samples in each update"),
    "--seed": _number("N", default=0),
    "--epoch": _number("N", default=0),
    "--model": _text("NAME", "a model's name or folder: predicts time for its sizes; in demo: is trained"),
    "--gpu-memory": _text("SIZE", "such as 80GB or 24GiB (default: %(default)s); in doctor with --model: does it fit?"),
    "--mode": _text(None, choices=["train", "forward", "generate"], default="train"),
    "--dtype": _text(None, "of the parameters, e.g. bfloat16; default: the model's"),
    "--autocast": _text(None, "lower precision of torch.autocast, e.g. bfloat16; default: not used"),
    "--max-new-tokens": _number("N", "with --mode generate (default: %(default)s)", default=256),
    "--gradient-checkpointing": _switch("activations are computed again"),
    "--lora": _switch("adapters are trained, the model is frozen"),
    "--fsdp": _number("R", "parameters, gradients and optimizer spread over R ranks"),
    "--lengths": _number("T", "tokens of the longest sample: 512 2k 8k", tokens, nargs="+"),
    "--shapes": _number("NxL", "also show samples x tokens, e.g. 8x512", _shape, nargs="+", default=[]),
    "--measure": _switch("run random weights on the CUDA device here; default: simulate"),
    "--output": _text("PARQUET", "also save the rows"),
    "--picture": _text("PNG", "also save a picture"),
    "--json": _switch("print the figures as JSON"),
    "--texts": _text("FILE", "one text a line; default: docstrings found on this machine"),
    "--budget": _number("T", "tokens a batch may have, padding counted", tokens),
    "--device": _text(None, "cpu, cuda, ...; default: cuda if there is one"),
    "--samples": _number("N", "texts to train on, if there is time"),
    "--seconds": _number("S", "training stops after so long, in both runs at the same update", float),
    "--learning-rate": _number("R", kind=float),
    "--results": _text("JSON", "where the figures are saved"),
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="dynagroup", description="Batches that fit.")
    parser.add_argument("--version", action="version", version=f"dynagroup {dynagroup.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        of_command = commands.add_parser(
            name, help=command.does, description=f"{command.does[0].upper()}{command.does[1:]}."
        )
        for option in command.options.split():
            needed: dict[str, Any] = {"required": True} if option in command.required else {}
            of_command.add_argument(option, **OPTIONS[option], **needed)
        of_command.set_defaults(**command.defaults)
    return parser
