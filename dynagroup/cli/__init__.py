"""The command line: its commands and their options. The module ``commands`` runs them."""

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

import dynagroup

# Loggers whose warnings would repeat our own errors, or do not matter when only lengths are asked for.
QUIET = (
    "huggingface_hub.repocard",
    "huggingface_hub.utils._http",
    "transformers.modeling_utils",
    "transformers.tokenization_utils_base",
)

FILES = "npy, npz, txt, csv, tsv, jsonl, json, parquet, fasta, a folder of datasets, or a pattern"
TRUNCATED = "truncate longer samples to this many tokens"
JSON = "print the results as JSON"
DEVICE = "device of the training, cpu, cuda, ...; default: cuda if available"
MOST_TOKENS = "most tokens of a batch with padding, e.g. 16k"
MEMORY = "device memory, e.g. 80GB or 24GiB"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status. A user's mistake is printed in one line, and gives status 2."""
    args = _parser().parse_args(arguments)

    def show_warning(message: Warning | str, *_: object) -> None:
        _say(args.command, f"warning: {message}")

    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.showwarning = show_warning
        try:
            from dynagroup.cli.commands import run

            run(args)
        except ModuleNotFoundError as error:
            if not error.name or error.name.startswith("dynagroup"):
                raise
            _say(
                args.command,
                f"the package {error.name} is missing; install it with: pip install dynagroup[hf,viz,parquet]",
            )
            return 2
        except (ValueError, OSError) as error:  # a mistake, or what cannot be read
            _say(args.command, str(error).strip() or repr(error))
            return 2
        except KeyboardInterrupt:
            return 130
    return 0


def _say(command: str, message: str) -> None:
    print(f"dynagroup {command}: {' '.join(message.split())}", file=sys.stderr)


def tokens(text: str) -> int:
    """Returns a number of tokens from text; ``k`` means 1,024.

    >>> tokens("4096"), tokens("16k"), tokens("1.5k")
    (4096, 16384, 1536)
    """
    number = text
    unit = 1
    if text.endswith(("k", "K")):
        number = text[:-1]
        unit = 1024
    try:
        return int(float(number) * unit)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"must be a number of tokens, such as 16384 or 16k, but is {text!r}"
        ) from None


class _Parser(argparse.ArgumentParser):
    """Prints what is wrong with the arguments in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="dynagroup", description="Batches that fit.")
    parser.add_argument("--version", action="version", version=f"dynagroup {dynagroup.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (purpose, groups) in COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=f"{purpose.capitalize()}.")
        command.set_defaults(picture=None, html=None, mode="train")
        command.set_defaults(kinds=None, output=None, processes=None)
        for add_options in groups:
            add_options(command)
    return parser


def _add_samples(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("data", metavar="DATA", nargs="+", help=f"lengths, token ids or texts: {FILES}")
    add(
        "--column",
        metavar="C[,C]",
        help="column of lengths, ids or texts; several columns are several streams",
    )
    add("--tokenizer", metavar="NAME", help="transformers tokenizer, if DATA contains texts")
    add(
        "--length-of",
        choices=("words", "characters", "bytes"),
        help="what to count in texts, without a tokenizer",
    )
    add(
        "--sample-by",
        choices=("line", "paragraph", "document"),
        default="line",
        help="what is a sample of a .txt file (default: line)",
    )
    add("--max-length", metavar="T", type=tokens, help=TRUNCATED)
    add("--json", action="store_true", help=JSON)


def _add_output(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "--output",
        metavar="FILE",
        required=True,
        help="lengths.npy, or .npz for several columns; a killed run continues",
    )
    add(
        "--processes",
        metavar="N",
        type=int,
        help="number of processes; default: one, in which a fast tokenizer uses all cores",
    )


def _add_batches(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "--kinds",
        metavar="C",
        help="column of labels; all batches of a step then have samples of one kind",
    )
    add("--world-size", metavar="R", type=int, default=1, help="number of ranks (default: 1)")
    add("--device", metavar="NAME", help=DEVICE)


def _add_layout(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "--layout",
        choices=("padded", "packed"),
        default="padded",
        help="layout of dynagroup's batches (default: padded)",
    )
    add(
        "--pad-to-multiple-of",
        metavar="N",
        type=int,
        default=1,
        help="pad lengths to a multiple of this many tokens (default: 1)",
    )


def _add_plan(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--max-tokens", metavar="T", type=tokens, required=True, help=MOST_TOKENS)
    add("--shuffle", action="store_true", help="form new batches in every epoch")
    add(
        "--samples-per-update",
        metavar="N",
        type=int,
        help="exact number of samples in each update",
    )


def _add_today(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "--batch-size",
        metavar="N",
        type=int,
        required=True,
        help="samples in a batch of one rank today",
    )
    add(
        "--accumulation",
        metavar="N",
        type=int,
        default=1,
        help="batches in one update today (default: 1)",
    )
    add(
        "--max-tokens",
        metavar="T",
        type=tokens,
        help=f"{MOST_TOKENS}; default: --batch-size times the longest",
    )
    add("--model", metavar="NAME", help="a model's name or folder, to predict its time")


def _add_picture(command: argparse.ArgumentParser) -> None:
    command.add_argument("--picture", metavar="PNG", help="also save a picture")


def _add_page(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--gpu-memory", metavar="SIZE", help=f"{MEMORY}; needs --model, to check memory")
    add("--html", metavar="FILE", help="also save a web page: the code, the table and pictures")


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "model",
        metavar="MODEL",
        help="a model's name, or a folder with a config.json; weights are not read",
    )
    command.add_argument("--json", action="store_true", help=JSON)


def _add_workload(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "--dtype",
        metavar="TYPE",
        help="dtype of the parameters, e.g. bfloat16; default: the model's",
    )
    add(
        "--autocast",
        metavar="TYPE",
        help="lower precision of torch.autocast, e.g. bfloat16; default: not used",
    )
    add(
        "--attention",
        choices=("eager", "sdpa", "flash"),
        help="attention of the model; default: the model's own",
    )
    add("--gradient-checkpointing", action="store_true", help="use gradient checkpointing")
    add("--lora", action="store_true", help="train LoRA adapters only")
    add(
        "--fsdp",
        metavar="R",
        type=int,
        help="shard parameters, gradients and optimizer state over R ranks",
    )


def _add_fit(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--gpu-memory", metavar="SIZE", required=True, help=MEMORY)
    add(
        "--mode",
        choices=("train", "forward", "generate"),
        default="train",
        help="what the model is run for (default: train)",
    )
    add(
        "--max-new-tokens",
        metavar="N",
        type=int,
        default=256,
        help="tokens to generate per prompt, with --mode generate (default: 256)",
    )
    add(
        "--for",
        dest="framework",
        choices=("verl", "trl", "llamafactory", "nemo", "megatron"),
        help="also print the setting of this framework (sets packed layout, and flash attention by default)",
    )
    add("--max-length", metavar="T", type=tokens, help=TRUNCATED)
    add(
        "--measure",
        action="store_true",
        help="run random weights on the local CUDA device; default: trace the model",
    )


def _add_demo(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "--texts",
        metavar="FILE",
        help="file with one text per line; default: docstrings found on this machine",
    )
    add("--tokenizer", metavar="NAME", help="transformers tokenizer")
    add("--model", metavar="NAME", help="name or folder of the model to train")
    add("--device", metavar="NAME", help=DEVICE)
    add("--max-length", metavar="T", type=tokens, help=TRUNCATED)
    add("--samples", metavar="N", type=int, help="most texts to train on")


_DATA = (_add_samples, _add_batches, _add_layout)
COMMANDS = {  # command -> what it does, and the functions that add its options
    "lengths": (
        "measure the lengths of samples in files, once, on all cores",
        (_add_samples, _add_output),
    ),
    "plan": (
        "plan the batches of an epoch and show a table",
        (*_DATA, _add_plan, _add_picture),
    ),
    "compare": (
        "compare fixed batches, group_by_length and dynagroup on your lengths",
        (*_DATA, _add_today, _add_picture),
    ),
    "doctor": (
        "show what your batches waste and what to change",
        (*_DATA, _add_today, _add_workload, _add_page),
    ),
    "fit": (
        "show which batches of a model fit a device, and the code for that budget",
        (_add_model, _add_fit, _add_workload, _add_layout, _add_picture),
    ),
    "check": (
        "test how a model treats padding and packed samples, and what its loss is a mean of",
        (_add_model,),
    ),
    "demo": ("train a small model with fixed batches and with dynagroup's", (_add_demo,)),
}
