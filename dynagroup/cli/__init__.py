"""The command line: ``dynagroup plan | compare | doctor | fit | profile | demo``. ``commands`` does, ``inputs`` reads."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import dynagroup
from dynagroup.cli.commands import COMMANDS, run
from dynagroup.cli.inputs import KINDS, tokens

__all__ = ["main"]

# A hub that cannot be reached is told once, by our own error; a text longer than a model takes is no news where lengths are
# what is asked for.
QUIET = ("huggingface_hub.utils._http", "transformers.tokenization_utils_base")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit status.

    A user's mistake is printed as one line, with status 2.
    """
    args = _parser().parse_args(arguments)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)

    def say(message: str) -> int:
        print(f"dynagroup {args.command}: {' '.join(message.split())}", file=sys.stderr)
        return 2

    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: say(f"warning: {message}")
        try:
            run(args)
        except ModuleNotFoundError as error:
            if not error.name or error.name.startswith("dynagroup"):
                raise
            return say(f"the package {error.name} is missing: install dynagroup[hf,viz,parquet]")
        except (ValueError, OSError) as error:  # a mistake; a file or a model that cannot be read
            return say(str(error).strip() or repr(error))
        except KeyboardInterrupt:
            return 130
    return 0


OPTIONS: dict[str, tuple[str, str]] = {
    "data": ("DATA", f"lengths, token ids or texts: {KINDS}"),
    "--column": ("C[,C]", "of a table or .npz: lengths, ids or (with --tokenizer) texts; several are padded streams"),
    "--tokenizer": ("NAME", "transformers tokenizer: DATA then holds texts"),
    "--max-length": ("T", "tokens that longer samples are truncated to"),
    "--max-tokens": ("T", "tokens a batch may have, padding counted: 16k (default: --batch-size times the longest)"),
    "--batch-size": ("N", "samples of a batch on one rank today"),
    "--layout": ("padded|packed", "of dynagroup's batches"),
    "--headroom": ("H", "share of the memory to use (default: %(default)s)"),
    "--pad-to-multiple-of": ("N", "(default: 1)"),
    "--accumulation": ("N", "such batches of an update (default: 1)"),
    "--world-size": ("R", "ranks (default: 1)"),
    "--shuffle": ("", "other batches every epoch"),
    "--window": ("N", "samples sorted together"),
    "--samples-per-update": ("N", "exactly so many samples in each update"),
    "model": ("MODEL", "a model's name, or a folder with a config.json; no weights are read"),
    "--model": ("NAME", "a model's name or folder: predicts time for its sizes; in demo: is trained"),
    "--gpu-memory": ("SIZE", "such as 80GB or 24GiB (default: %(default)s); in doctor with --model: does it fit?"),
    "--mode": ("train|forward|generate", "(default: train)"),
    "--dtype": ("TYPE", "of the parameters, e.g. bfloat16; default: the model's"),
    "--autocast": ("TYPE", "lower precision of torch.autocast, e.g. bfloat16; default: not used"),
    "--max-new-tokens": ("N", "with --mode generate (default: %(default)s)"),
    "--gradient-checkpointing": ("", "activations are computed again"),
    "--lora": ("", "adapters are trained, the model is frozen"),
    "--fsdp": ("R", "parameters, gradients and optimizer spread over R ranks"),
    "--lengths": ("T", "tokens of the longest sample: 512 2k 8k"),
    "--measure": ("", "run random weights on the CUDA device here; default: simulate"),
    "--picture": ("PNG", "also save a picture"),
    "--json": ("", "print the figures as JSON"),
    "--texts": ("FILE", "one text a line; default: docstrings found on this machine"),
    "--budget": ("T", "tokens a batch may have, padding counted"),
    "--device": ("NAME", "cpu, cuda, ...; default: cuda if there is one"),
    "--samples": ("N", "texts to train on, if there is time"),
    "--seconds": ("S", "training stops after so long"),
}
TYPES: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(["--max-length", "--max-tokens", "--lengths", "--budget"], tokens),
    **dict.fromkeys(["--headroom", "--seconds"], float),
}
DEFAULTS = {"headroom": 0.9, "pad_to_multiple_of": 1, "accumulation": 1, "world_size": 1}
DEFAULTS |= {"layout": "padded", "mode": "train", "max_new_tokens": 256}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="dynagroup", description="Batches that fit.")
    parser.add_argument("--version", action="version", version=f"dynagroup {dynagroup.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        made = commands.add_parser(name, help=command.does, description=f"{command.does.capitalize()}.")
        for option in command.options.split():
            made.add_argument(option, **_settings(option, option in command.required))
        made.set_defaults(**{**({} if name == "demo" else DEFAULTS), **command.defaults})
    return parser


def _settings(option: str, required: bool) -> dict[str, Any]:
    metavar, text = OPTIONS[option]
    if not metavar:
        return {"action": "store_true", "help": text}
    if "|" in metavar:
        return {"choices": metavar.split("|"), "help": text}
    kind = TYPES.get(option, int if metavar in ("N", "R") else str)
    several = {"nargs": "+"} if option == "--lengths" else {}
    return {"metavar": metavar, "help": text, "type": kind, **several, **({"required": True} if required else {})}
