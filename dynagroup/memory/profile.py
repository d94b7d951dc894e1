"""``dynagroup profile``: how many samples of each length fit a device."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dynagroup.errors import ConfigError
from dynagroup.memory.profiled import ProfiledMemory
from dynagroup.memory.simulate import simulate
from dynagroup.memory.workload import Workload

if TYPE_CHECKING:
    from dynagroup.memory.measurements import Measurements

__all__ = ["add_profile_command", "bytes_of", "profile"]

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)


def bytes_of(text: str) -> int:
    """Bytes from "80GB" or "24 GiB".

    >>> bytes_of("80GB"), bytes_of("1.5 GiB")
    (80000000000, 1610612736)
    """
    found = re.fullmatch(r"\s*([\d.]+)\s*([kKmMgGtT]?[iI]?[bB]?)\s*", text)
    unit = found[2].upper() if found else ""
    if found is None or unit not in UNITS:
        raise ConfigError(f"`gpu_memory` must be a size such as 80GB or 24GiB, but is {text!r}")
    return int(float(found[1]) * UNITS[unit])


def profile(
    model_or_config: Any,
    workload: Workload,
    gpu_memory: int,
    *,
    lengths: Sequence[int] = LENGTHS,
    headroom: float = 0.9,
) -> tuple[str, ProfiledMemory, Measurements]:
    """A table of "how many samples of this length fit", with a first ``batch_size`` suggested for the longest.

    Args:
        model_or_config: a model, a transformers config or its name; only its shapes are used.
        gpu_memory: bytes of the device. headroom: share of it that may be used.
        lengths: tokens of the longest sample, ascending.

    >>> from transformers import GPT2Config
    >>> config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=1000)
    >>> text, memory, rows = profile(config, Workload.from_model(config), 2 * 10**9, lengths=[128, 1024])
    >>> "batch_size" in text
    True
    """
    shapes = [(n, length) for length in (64, 256, 768, 1536) for n in (2, 8)]
    rows = simulate(model_or_config, workload, shapes)
    memory = ProfiledMemory.fit(rows)
    most = memory.largest(np.array(lengths), headroom * gpu_memory)
    head = f"static {memory.static_bytes / 1e9:.2f} GB, device {gpu_memory / 1e9:.0f} GB, headroom {headroom:.0%}, {rows.workload.mode}"  # noqa: E501
    lines = [head, f"{'longest':>8}  {'samples':>8}  {'padded tokens':>13}"]
    lines += [f"{length:>8}  {n:>8}  {n * length:>13}" for length, n in zip(lengths, most.tolist(), strict=True)]
    fitting = [(length, n) for length, n in zip(lengths, most.tolist(), strict=True) if n > 0]
    if fitting:
        longest, n = fitting[-1]
        lines.append(f"for samples of up to {longest} tokens: MemoryBudget(batch_size={n}, longest={longest})")
    else:
        lines.append("not even one sample fits; use checkpointing, a leaner optimizer, LoRA, sharding, or more memory")
    return "\n".join(lines), memory, rows


def plot(memory: ProfiledMemory, gpu_memory: int, path: Path, headroom: float = 0.9) -> None:
    """Batch size over length, saved as a picture. Needs matplotlib."""
    from matplotlib.figure import Figure

    lengths = np.unique(np.geomspace(32, 8192, 120).astype(np.int64))
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.loglog(lengths, np.maximum(memory.largest(lengths, headroom * gpu_memory), 0.5))
    axes.set(
        xlabel="tokens of the longest sample",
        ylabel="samples that fit",
        title=f"{gpu_memory / 1e9:.0f} GB, headroom {headroom:.0%}",
    )
    figure.savefig(path, dpi=120)


def add_profile_command(subparsers: Any) -> None:
    """Add ``profile`` to the command line's subcommands."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "profile", help="how many samples of each length fit a device"
    )
    parser.add_argument("model", help="a model's name, or a folder with a config.json; no weights are read")
    parser.add_argument("--mode", choices=("train", "forward", "generate"), default="train")
    parser.add_argument("--gpu-memory", default="80GB", help="such as 80GB or 24GiB")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16", help="of the parameters"
    )
    parser.add_argument("--autocast", choices=("bfloat16", "float16"), default=None)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--headroom", type=float, default=0.9)
    parser.add_argument("--picture", type=Path, default=Path("profile.png"), help="where to save the picture")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    known = {"dtype": arguments.dtype, "gradient_checkpointing": arguments.gradient_checkpointing}
    if arguments.autocast:
        known["autocast"] = arguments.autocast
    if arguments.mode == "generate":
        known["max_new_tokens"] = arguments.max_new_tokens
    workload = Workload.from_model(arguments.model, arguments.mode, **known)
    size = bytes_of(arguments.gpu_memory)
    text, memory, _ = profile(arguments.model, workload, size, headroom=arguments.headroom)
    print(text)
    plot(memory, size, arguments.picture, arguments.headroom)
    print(f"picture: {arguments.picture}")
    return 0
