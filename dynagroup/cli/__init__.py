"""The command line: its commands and their options. The module ``commands`` runs them."""

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import dynagroup

# Loggers whose warnings would repeat our own errors, or do not matter when only lengths are asked for.
QUIET = (
    "huggingface_hub.repocard",
    "huggingface_hub.utils._http",
    "transformers.modeling_utils",
    "transformers.tokenization_utils_base",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status. A user's mistake is printed in one line, and gives status 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _check_options(words)
    except ValueError as error:
        _say(words[0], str(error))
        return 2
    args = _parser().parse_args(words)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: _say(args.command, f"warning: {message}")
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


def _check_options(words: Sequence[str]) -> None:
    """Raises ConfigError for a misspelt option: argparse would first name the ones that are missing."""
    from dynagroup.validation import check_names

    if not words or words[0] not in COMMANDS:
        return
    _, options = COMMANDS[words[0]]
    known = ["--help", *(option.rstrip("!") for option in options.split())]
    unknown = []
    for word in words[1:]:
        name = word.partition("=")[0]
        is_known = any(option.startswith(name) for option in known)  # a beginning is enough
        if name.startswith("--") and not is_known:
            unknown.append(name)
    check_names(f"the command {words[0]}", unknown, known)


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


SAMPLES = "data --column --tokenizer --length-of --sample-by --max-length --json"
DATA = f"{SAMPLES} --kinds --world-size --layout --pad-to-multiple-of"
TODAY = f"{DATA} --batch-size! --max-tokens --accumulation --model --device"
MEASURE = f"{SAMPLES} --output! --processes"
PLAN = f"{DATA} --max-tokens! --shuffle --window --samples-per-update --device --picture"
DOCTOR = f"{TODAY} --gpu-memory --dtype --gradient-checkpointing --lora --html"
DEMO = "--texts --tokenizer --model --device --budget --max-length --samples --seconds"
FOR = "verl|trl|llamafactory|nemo|megatron"
FILES = "npy, npz, txt, csv, tsv, jsonl, json, parquet, fasta, a folder of datasets, or a pattern"
FIT = (
    "model --gpu-memory! --headroom --mode --max-new-tokens --dtype --autocast --attention --gradient-checkpointing --lora "
    "--fsdp --layout --pad-to-multiple-of --for --max-length --picture --json"
)
COMMANDS = {  # command -> what it does, and its options; those with ! are required
    "lengths": ("measure the lengths of samples in files, once, on all cores", MEASURE),
    "plan": ("plan the batches of an epoch and show a table", PLAN),
    "compare": (
        "compare fixed batches, group_by_length and dynagroup on your lengths",
        f"{TODAY} --picture",
    ),
    "doctor": ("show what your batches waste and what to change", DOCTOR),
    "fit": ("show which batches of a model fit a device, and the code for that budget", FIT),
    "profile": ("do the same as fit, or measure on the local device", f"{FIT} --measure"),
    "check": (
        "test how a model treats padding and packed samples, and what its loss is a mean of",
        "model --json",
    ),
    "demo": ("train a small model with fixed batches and with dynagroup's", DEMO),
}
OPTIONS: dict[str, tuple[Any, ...]] = {  # name -> placeholder of its value, meaning, default
    "data": ("DATA", f"lengths, token ids or texts: {FILES}"),
    "--column": (
        "C[,C]",
        "column of lengths, ids or texts; several columns are several streams",
    ),
    "--kinds": ("C", "column of labels; all batches of a step then have samples of one kind"),
    "--tokenizer": ("NAME", "transformers tokenizer, if DATA contains texts"),
    "--length-of": ("words|characters|bytes", "what to count in texts, without a tokenizer"),
    "--max-length": ("T", "truncate longer samples to this many tokens"),
    "--sample-by": ("line|paragraph|document", "what is a sample of a .txt file", "line"),
    "--max-tokens": (
        "T",
        "most tokens of a batch with padding, e.g. 16k; default: --batch-size times the longest",
    ),
    "--batch-size": ("N", "samples in a batch of one rank today"),
    "--layout": ("padded|packed", "layout of dynagroup's batches", "padded"),
    "--headroom": ("H", "share of the memory to use", 0.9),
    "--pad-to-multiple-of": ("N", "pad lengths to a multiple of this many tokens", 1),
    "--accumulation": ("N", "batches in one update today", 1),
    "--world-size": ("R", "number of ranks", 1),
    "--shuffle": ("", "form new batches in every epoch"),
    "--window": ("N", "samples that are planned together"),
    "--samples-per-update": ("N", "exact number of samples in each update"),
    "model": ("MODEL", "a model's name, or a folder with a config.json; weights are not read"),
    "--model": (
        "NAME",
        "a model's name or folder, to predict its time; in demo: the model to train",
    ),
    "--gpu-memory": (
        "SIZE",
        "device memory, e.g. 80GB or 24GiB; doctor needs it and --model to check memory",
    ),
    "--mode": ("train|forward|generate", "what the model is run for", "train"),
    "--dtype": ("TYPE", "dtype of the parameters, e.g. bfloat16; default: the model's"),
    "--autocast": ("TYPE", "lower precision of torch.autocast, e.g. bfloat16; default: not used"),
    "--attention": ("eager|sdpa|flash", "attention of the model; default: the model's own"),
    "--for": (
        FOR,
        "also print the setting of this framework (sets packed layout, and flash attention by default)",
    ),
    "--max-new-tokens": ("N", "tokens to generate per prompt, with --mode generate", 256),
    "--gradient-checkpointing": ("", "use gradient checkpointing"),
    "--lora": ("", "train LoRA adapters only"),
    "--fsdp": ("R", "shard parameters, gradients and optimizer state over R ranks"),
    "--measure": ("", "run random weights on the local CUDA device; default: simulate"),
    "--picture": ("PNG", "also save a picture"),
    "--html": ("FILE", "also save a web page: the code, the table and pictures"),
    "--json": ("", "print the results as JSON"),
    "--output": ("FILE", "lengths.npy, or .npz for several columns; a killed run continues"),
    "--processes": (
        "N",
        "number of processes; default: one, in which a fast tokenizer uses all cores",
    ),
    "--texts": ("FILE", "file with one text per line; default: docstrings found on this machine"),
    "--budget": ("T", "most tokens of a batch, with padding"),
    "--device": ("NAME", "device of the training, cpu, cuda, ...; default: cuda if available"),
    "--samples": ("N", "most texts to train on"),
    "--seconds": ("S", "stop training after this many seconds"),
}
TYPES: dict[str, Callable[[str], int | float]] = {
    "T": tokens,
    "N": int,
    "R": int,
    "H": float,
    "S": float,
}


class _Parser(argparse.ArgumentParser):
    """Prints what is wrong with the arguments in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="dynagroup", description="Batches that fit.")
    parser.add_argument("--version", action="version", version=f"dynagroup {dynagroup.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (purpose, options) in COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=f"{purpose.capitalize()}.")
        command.set_defaults(picture=None, html=None, kinds=None, measure=None, fsdp=None)
        for option in options.split():
            _add(command, option.rstrip("!"), is_required=option.endswith("!"))
    return parser


def _add(command: argparse.ArgumentParser, name: str, *, is_required: bool) -> None:
    metavar, meaning, default = (*OPTIONS[name], None)[:3]
    if not metavar:
        command.add_argument(name, action="store_true", help=meaning)
        return
    settings: dict[str, Any] = {"help": meaning, "default": default}
    if default is not None:
        settings["help"] = f"{meaning} (default: {default})"
    if "|" in metavar:
        settings["choices"] = metavar.split("|")
    else:
        settings["metavar"] = metavar
        settings["type"] = TYPES.get(metavar, str)
    if is_required:
        settings["required"] = True
    if name == "data":
        settings["nargs"] = "+"
    command.add_argument(name, **settings)
