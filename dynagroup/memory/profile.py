"""How many samples of each length fit a device: what ``dynagroup profile`` prints and draws."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dynagroup.errors import ConfigError
from dynagroup.memory.fits import bytes_of
from dynagroup.memory.profiled import ProfiledMemory
from dynagroup.memory.trace.simulate import Shape, simulate
from dynagroup.memory.workload import Workload

if TYPE_CHECKING:
    from dynagroup.memory.measurements import Measurements

__all__ = ["bytes_of", "draw_profile", "profile", "profile_lengths", "profile_shapes", "suggest"]

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
LONGEST_RUN = 8192


def profile_lengths(model_or_config: Any) -> list[int]:
    """Tokens of the longest sample, ascending, that the model has positions for.

    >>> from transformers import GPT2Config
    >>> profile_lengths(GPT2Config(n_positions=700))
    [128, 256, 512, 700]
    """
    most = min(_positions(model_or_config), LENGTHS[-1])
    return [length for length in LENGTHS if length < most] + [most]


def profile_shapes(model_or_config: Any) -> list[Shape]:
    """The eight shapes that a profile is fitted to: two numbers of samples, four lengths that the model has positions for."""
    most = min(_positions(model_or_config), LONGEST_RUN)
    lengths = sorted({max(1, most // 24), max(1, most // 6), max(1, most // 2), most})
    return [(n, length) for length in lengths for n in (2, 8)]


def _positions(model_or_config: Any) -> int:
    from dynagroup.memory.trace.build import as_config, is_model

    config = model_or_config.config if is_model(model_or_config) else as_config(model_or_config)
    text = config.get_text_config()
    return int(getattr(text, "max_position_embeddings", None) or LENGTHS[-1])


def profile(
    model_or_config: Any,
    workload: Workload,
    gpu_memory: int,
    *,
    lengths: Sequence[int] | None = None,
    headroom: float = 0.9,
) -> tuple[str, ProfiledMemory, Measurements]:
    """Simulates a handful of shapes, and says how many samples of each length fit and which ``batch_size`` to begin with.

    Args:
        model_or_config: a model, a transformers config or its name; only its shapes are used.
        gpu_memory: bytes of the device. headroom: share of it that may be used.
        lengths: tokens of the longest sample, ascending; default: :func:`profile_lengths`.

    >>> from transformers import GPT2Config
    >>> config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=1000)
    >>> text, memory, rows = profile(config, Workload.from_model(config), 2 * 10**9, lengths=[128, 1024])
    >>> "batch_size" in text
    True
    """
    rows = simulate(model_or_config, workload, profile_shapes(model_or_config))
    memory = ProfiledMemory.fit(rows)
    wanted = profile_lengths(model_or_config) if lengths is None else lengths
    head = f"{rows.workload.mode}, {rows.source}"
    return suggest(memory, gpu_memory, wanted, headroom=headroom, title=head), memory, rows


def suggest(
    memory: ProfiledMemory, gpu_memory: int, lengths: Sequence[int], *, headroom: float = 0.9, title: str = "profile"
) -> str:
    """A table of "so many samples of this length fit", and the ``batch_size`` for the longest of which one does.

    >>> memory = ProfiledMemory(0, ("tokens",), ((0.0, 0.0, 1e6, 0.0),), 0.0)
    >>> print(suggest(memory, 10**9, [100, 500, 1000]).splitlines()[-1])
    for samples of up to 500 tokens: MemoryBudget(batch_size=1, longest=500)
    """
    from dynagroup.shapes import TOKENS

    if not 0 < headroom <= 1:
        raise ConfigError(f"`headroom` is the share of the device that may be used, at most 1.0, but is {headroom!r}")
    most = memory.largest({TOKENS: np.array(lengths)}, headroom * gpu_memory).tolist()
    lines = [
        f"{title}: static {memory.static_bytes / 1e9:.2f} GB, device {gpu_memory / 1e9:.3g} GB, headroom {headroom:.0%}",
        f"{'longest':>8}  {'samples':>8}  {'padded tokens':>13}",
        *(f"{length:>8}  {n:>8}  {n * length:>13}" for length, n in zip(lengths, most, strict=True)),
    ]
    fitting = [(length, n) for length, n in zip(lengths, most, strict=True) if n > 0]
    if not fitting:
        way_out = "use checkpointing, a leaner optimizer, LoRA, sharding, or more memory"
        return "\n".join([*lines, f"not even one sample fits; {way_out}"])
    longest, n = fitting[-1]
    return "\n".join(
        [*lines, f"for samples of up to {longest} tokens: MemoryBudget(batch_size={n}, longest={longest})"]
    )


def draw_profile(memory: ProfiledMemory, gpu_memory: int, longest: int, path: Path, *, headroom: float = 0.9) -> None:
    """Batch size over length, up to ``longest`` tokens, saved as a picture. Needs matplotlib."""
    from matplotlib.figure import Figure

    lengths = np.unique(np.geomspace(min(32, longest), longest, 120).astype(np.int64))
    most = memory.largest(lengths, headroom * gpu_memory).astype(np.float64)
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.loglog(lengths, np.where(most > 0, most, np.nan))
    axes.set(
        xlabel="tokens of the longest sample",
        ylabel="samples that fit",
        title=f"{gpu_memory / 1e9:.3g} GB, headroom {headroom:.0%}",
    )
    figure.savefig(path, dpi=120)
