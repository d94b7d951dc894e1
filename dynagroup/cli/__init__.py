"""The command line: ``dynagroup plan | compare | doctor | fit | profile | demo``. One file a command; ``inputs`` reads."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import dynagroup
from dynagroup.cli import compare, demo, doctor, fit, plan, profile
from dynagroup.errors import AlignmentError, BudgetError, ConfigError, StateError

__all__ = ["main"]

COMMANDS = {
    "plan": (plan, "plan an epoch and show its figures"),
    "compare": (compare, "fixed batches, group_by_length and dynagroup on your lengths"),
    "doctor": (doctor, "what your batches waste, and what to change, in five lines"),
    "fit": (fit, "how much of a model fits a device, and the line of code for it"),
    "profile": (profile, "how many samples of each length fit a device"),
    "demo": (demo, "train a small model with fixed batches and with dynagroup"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit status.

    A user's mistake is printed as one line, with status 2.
    """
    args = _parser().parse_args(arguments)
    try:
        with _in_lines(args.command):
            args.run(args)
    except (AlignmentError, BudgetError, ConfigError, StateError) as error:
        return _failed(args.command, str(error))
    except OSError as error:  # a file that cannot be written, a model's name that leads nowhere
        return _failed(args.command, str(error).strip().splitlines()[0] if str(error).strip() else repr(error))
    except ModuleNotFoundError as error:
        if not error.name or error.name.startswith("dynagroup"):
            raise
        return _failed(args.command, f"the package {error.name} is missing: install dynagroup[hf,viz,parquet]")
    except KeyboardInterrupt:
        return 130
    return 0


@contextmanager
def _in_lines(command: str) -> Iterator[None]:
    """Warnings are a line each; a hub that cannot be reached is told once, by our own error; and that a text is longer than
    a model takes says nothing here, where lengths are what is asked for."""
    quiet = [
        logging.getLogger(name) for name in ("huggingface_hub.utils._http", "transformers.tokenization_utils_base")
    ]
    levels = [logger.level for logger in quiet]
    for logger in quiet:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(
            f"dynagroup {command}: warning: {' '.join(str(message).split())}", file=sys.stderr
        )
        try:
            yield
        finally:
            for logger, level in zip(quiet, levels, strict=True):
                logger.setLevel(level)


def _failed(command: str, message: str) -> int:
    print(f"dynagroup {command}: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dynagroup", description="Batches that fit.")
    parser.add_argument("--version", action="version", version=f"dynagroup {dynagroup.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, text) in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + "."))
    return parser
