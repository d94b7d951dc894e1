"""The command line: its commands and options. The module ``commands`` runs them."""

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import dynagroup

# A hub that cannot be reached is told once, by our own error; a text too long for a model is no news where lengths are asked.
QUIET = ("huggingface_hub.utils._http", "transformers.tokenization_utils_base")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit status. A user's mistake is printed as one line, with status 2."""
    args = _parser().parse_args(arguments)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)

    def say(message: str) -> int:
        print(f"dynagroup {args.command}: {' '.join(message.split())}", file=sys.stderr)
        return 2

    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: say(f"warning: {message}")
        try:
            from dynagroup.cli.commands import run

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


def tokens(text: str) -> int:
    """A number of tokens; ``k`` is 1,024.

    >>> tokens("4096"), tokens("16k"), tokens("1.5k")
    (4096, 16384, 1536)
    """
    number, times = (text[:-1], 1024) if text[-1:] in ("k", "K") else (text, 1)
    try:
        return int(float(number) * times)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"must be a number of tokens, such as 16384 or 16k, but is {text!r}") from None


DATA = "data --column --kinds --tokenizer --max-length --world-size --layout --pad-to-multiple-of --json"
TODAY = f"{DATA} --batch-size! --max-tokens --accumulation --model"
MEASURE = "data --column --tokenizer --max-length --output! --processes --json"
PLAN = f"{DATA} --max-tokens! --shuffle --window --samples-per-update --picture --html"
DOCTOR = f"{TODAY} --gpu-memory --dtype --gradient-checkpointing --html"
DEMO = "--texts --tokenizer --model --device --budget --max-length --samples --seconds"
FOR = "verl|trl|llamafactory|nemo|megatron"
FILES = "npy, npz, txt, csv, tsv, jsonl, json, parquet, a folder of datasets, or a pattern"
FIT = (
    "model --gpu-memory! --headroom --mode --max-new-tokens --dtype --autocast --attention --gradient-checkpointing --lora "
    "--fsdp --layout --pad-to-multiple-of --for --max-length --picture --json"
)
COMMANDS = {  # command -> what it finds, and its options; those with ! must be given
    "lengths": ("measure files on all cores, once", MEASURE),
    "plan": ("plan an epoch and show its figures", PLAN),
    "compare": ("fixed batches, group_by_length and dynagroup on your lengths", f"{TODAY} --picture --html"),
    "doctor": ("what your batches waste, and what to change, in five lines", DOCTOR),
    "fit": ("how much of a model fits a device, and the line of code for it", FIT),
    "profile": ("the same, or measured on a device", f"{FIT} --measure"),
    "check": ("what a model makes of padding and of packed samples, whether its loss is a mean over tokens", "model --json"),
    "demo": ("train a small model with fixed batches and with dynagroup", DEMO),
}  # fmt: skip
OPTIONS: dict[str, tuple[Any, ...]] = {  # name -> what stands for its value, what it means, and its default
    "data": ("DATA", f"lengths, ids or texts: {FILES}"),
    "--column": ("C[,C]", "of a table or .npz: lengths, ids or (with --tokenizer) texts; several are streams"),
    "--kinds": ("C", "column of labels: all batches of a step are of one kind"),
    "--tokenizer": ("NAME", "transformers tokenizer: DATA then holds texts"),
    "--max-length": ("T", "tokens that longer samples are truncated to"),
    "--max-tokens": ("T", "tokens a batch may have, padding counted: 16k; default: --batch-size times the longest"),
    "--batch-size": ("N", "samples of a batch on one rank today"),
    "--layout": ("padded|packed", "of dynagroup's batches", "padded"),
    "--headroom": ("H", "share of the memory to use", 0.9),
    "--pad-to-multiple-of": ("N", "tokens", 1),
    "--accumulation": ("N", "such batches of an update", 1),
    "--world-size": ("R", "ranks", 1),
    "--shuffle": ("", "other batches every epoch"),
    "--window": ("N", "samples sorted together"),
    "--samples-per-update": ("N", "exactly so many samples in each update"),
    "model": ("MODEL", "a model's name, or a folder with a config.json; no weights are read"),
    "--model": ("NAME", "a model's name or folder: predicts time for its sizes; in demo: is trained"),
    "--gpu-memory": ("SIZE", "such as 80GB or 24GiB; in doctor with --model: does it fit?"),
    "--mode": ("train|forward|generate", "what the model is run for", "train"),
    "--dtype": ("TYPE", "of the parameters, e.g. bfloat16; default: the model's"),
    "--autocast": ("TYPE", "lower precision of torch.autocast, e.g. bfloat16; default: not used"),
    "--attention": ("eager|sdpa|flash", "what the model is run with; default: the model's"),
    "--for": (FOR, "also the setting of this framework; packed with flash attention, if you do not say"),
    "--max-new-tokens": ("N", "with --mode generate", 256),
    "--gradient-checkpointing": ("", "activations are computed again"),
    "--lora": ("", "adapters are trained, the model is frozen"),
    "--fsdp": ("R", "parameters, gradients and optimizer spread over R ranks"),
    "--measure": ("", "run random weights on the CUDA device here; default: simulate"),
    "--picture": ("PNG", "also save a picture"),
    "--html": ("FILE", "also save a page with the table and pictures"),
    "--json": ("", "print the figures as JSON"),
    "--output": ("FILE", "lengths.npy, or .npz for several columns; a run that was killed goes on"),
    "--processes": ("N", "that measure; default: one a core"),
    "--texts": ("FILE", "one text a line; default: docstrings found on this machine"),
    "--budget": ("T", "tokens a batch may have, padding counted"),
    "--device": ("NAME", "cpu, cuda, ...; default: cuda if there is one"),
    "--samples": ("N", "texts to train on, if there is time"),
    "--seconds": ("S", "training stops after so long"),
}
TYPES: dict[str, Callable[[str], Any]] = {"T": tokens, "N": int, "R": int, "H": float, "S": float}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="dynagroup", description="Batches that fit.")
    parser.add_argument("--version", action="version", version=f"dynagroup {dynagroup.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (does, options) in COMMANDS.items():
        made = commands.add_parser(name, help=does, description=f"{does.capitalize()}.")
        for option in options.split():
            settings = _settings(*OPTIONS[option.rstrip("!")], required=option.endswith("!"))
            made.add_argument(option.rstrip("!"), **settings)
    return parser


def _settings(metavar: str, text: str, default: Any = None, *, required: bool) -> dict[str, Any]:
    if not metavar:
        return {"action": "store_true", "help": text}
    shown = text if default is None else f"{text} (default: {default})"
    values = {"metavar": metavar, "type": TYPES.get(metavar, str)}
    values = {"choices": metavar.split("|")} if "|" in metavar else values
    return {"help": shown, "default": default, **values, **({"required": True} if required else {})}
