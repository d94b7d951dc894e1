"""What fits a device: how many samples of each length, which token budget, and the line of code for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.errors import ConfigError
from dynagroup.memory.protocols import BytesMemoryModel
from dynagroup.memory.run import Layout, Mode
from dynagroup.memory.traced import TracedMemory, positions_of
from dynagroup.memory.workload import Workload
from dynagroup.shapes import TOKENS, BatchShape, IntArray, round_up
from dynagroup.validation import check_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Fits", "parsed_bytes", "largest_within", "new_tokens_of", "token_budget", "usual_lengths", "what_fits"]

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
MOST_SAMPLES = 2**40
WAY_OUT = "use checkpointing, a leaner optimizer, LoRA, sharding, or more memory"


def parsed_bytes(memory: str | int) -> int:
    """Bytes from "80GB", "24 GiB" or a number.

    >>> parsed_bytes("80GB"), parsed_bytes("1.5 GiB"), parsed_bytes(24 * 10**9)
    (80000000000, 1610612736, 24000000000)
    """
    whole = isinstance(memory, (int, np.integer)) and not isinstance(memory, bool)
    text = str(memory) if whole else memory
    found = re.fullmatch(r"\s*(\d+\.?\d*)\s*([kKmMgGtT]?[iI]?[bB]?)\s*", text) if isinstance(text, str) else None
    unit = found[2].upper() if found else ""
    if found is None or unit not in UNITS or float(found[1]) == 0:
        raise ConfigError(f"`memory` must be a size such as 80GB or 24GiB, or a number of bytes, but is {memory!r}")
    if not unit and float(found[1]) < 1e6:
        raise ConfigError(f"`memory` is {memory!r}, which is so many bytes; write {found[1]}GB")
    return int(text) if whole else int(float(found[1]) * UNITS[unit])


def largest_within(
    fits: Callable[[IntArray], NDArray[np.bool_]], size: int, most: int | IntArray = MOST_SAMPLES
) -> IntArray:
    """For each of ``size`` questions the most samples, up to ``most``, that fit: int64 (size,), 0 where not even one does.

    Bisection over a monotone ``fits``, which is asked about all questions at once; at most 41 times.

    >>> largest_within(lambda count: count * np.array([10, 50]) <= 100, 2).tolist()
    [10, 2]
    """
    low, high = np.zeros(size, np.int64), np.full(size, most) + 1
    while (high - low > 1).any():
        middle = np.maximum((low + high) // 2, 1)
        ok = fits(middle) & (middle < high)
        low, high = np.where(ok, middle, low), np.where(ok, high, np.minimum(middle, high))
    return low


def _most(memory: BytesMemoryModel, room: float, longest: Any, size: int) -> IntArray:
    """Most samples of each of ``size`` (padded) lengths, or mappings of streams to lengths, within ``room`` bytes."""
    left = room - memory.static_bytes
    return largest_within(lambda count: memory.batch_bytes(BatchShape.of(count, longest)) <= left, size)


@dataclass(frozen=True)
class Fits:
    """How many samples of each length fit a device. ``print`` it, or take the numbers.

    Made by :func:`what_fits`; ``MemoryBudget.from_model`` with the same arguments decides the same.
    """

    memory: BytesMemoryModel
    limit_bytes: int
    headroom: float
    pad_to_multiple_of: int
    lengths: tuple[int, ...]
    """Tokens of the longest sample, ascending."""
    samples: tuple[int, ...]
    """Most samples of each of ``lengths``."""
    max_tokens: int
    """A token budget under which no batch of samples up to the longest of ``lengths`` exceeds the limit; 0: none. In
    generation it counts ``new_tokens`` beside each prompt's."""
    code: str
    """The line of Python that makes the same decisions."""
    title: str
    assumes: str = ""
    """How the model is taken to be run, what was not said included: "train, float32, sdpa attention, ..."."""
    new_tokens: int = 0
    """Tokens that are generated for each sample, beside its own."""

    @classmethod
    def of(
        cls,
        memory: BytesMemoryModel,
        limit_bytes: int,
        lengths: Sequence[int],
        *,
        headroom: float = 0.9,
        pad_to_multiple_of: int = 1,
        code: str = "MemoryBudget.from_bytes(limit_bytes, model=memory)",
        title: str = "what fits",
        assumes: str = "",
        new_tokens: int = 0,
    ) -> Fits:
        """What a model of memory, a :class:`ProfiledMemory` of measured rows say, lets fit a device.

        >>> from dynagroup.memory.profiled import ProfiledMemory
        >>> Fits.of(ProfiledMemory(0, ("tokens",), ((0.0, 0.0, 1e6, 0.0),), 0.0), 10**9, [100, 900]).samples
        (9, 1)
        """
        check_number("headroom", headroom, most=1.0)
        wanted = sorted(int(length) for length in lengths)
        if not wanted or wanted[0] < 1:
            raise ConfigError(f"`lengths` must be positive numbers of tokens, but is {lengths!r}")
        room, multiple = headroom * limit_bytes, pad_to_multiple_of
        samples = tuple(_most(memory, room, round_up(np.array(wanted), multiple), len(wanted)).tolist())
        longest = max((length for length, count in zip(wanted, samples, strict=True) if count), default=0)
        tokens = token_budget(memory, room, longest, multiple=multiple, new_tokens=new_tokens)
        told = (tokens, code, title, assumes, new_tokens)
        return cls(memory, limit_bytes, headroom, multiple, tuple(wanted), samples, *told)

    def most_samples(self, longest: int | Mapping[str, int]) -> int:
        """Most samples of a batch whose longest has so many tokens, or so many units of each padded stream.

        >>> from dynagroup.memory.profiled import ProfiledMemory
        >>> found = Fits.of(ProfiledMemory(0, ("tokens",), ((0.0, 0.0, 1e6, 0.0),), 0.0), 10**9, [100])
        >>> found.most_samples(300), found.most_samples({"tokens": 300, "target": 50})
        (3, 3)
        """
        units = longest if isinstance(longest, Mapping) else {TOKENS: longest}
        padded = {k: round_up(np.array([v], np.int64), self.pad_to_multiple_of) for k, v in units.items()}
        return int(_most(self.memory, self.headroom * self.limit_bytes, padded, 1)[0])

    def rows(self) -> list[tuple[int, int, int, int]]:
        """(tokens of the longest sample, most samples, their tokens with padding and new ones, their bytes, static included)"""
        counts, lengths = np.array(self.samples), round_up(np.array(self.lengths), self.pad_to_multiple_of)
        grown = self.memory.batch_bytes(BatchShape.of(np.maximum(counts, 1), lengths))
        taken = np.where(counts > 0, self.memory.static_bytes + grown, 0).astype(np.int64).tolist()
        tokens = (counts * (lengths + self.new_tokens)).tolist()
        return list(zip(self.lengths, self.samples, tokens, taken, strict=True))

    @property
    def token_code(self) -> str:
        """The token budget as a line of Python: of lengths, or in generation of lengths and new tokens."""
        options = "" if self.pad_to_multiple_of == 1 else f", pad_to_multiple_of={self.pad_to_multiple_of}"
        packed = ', layout="packed"' if getattr(self.memory, "layout", "padded") == "packed" else ""
        return f"TokenBudget({self.max_tokens}{options}{packed})"

    def __str__(self) -> str:
        gb, prompts = 1e9, self.new_tokens > 0
        named = f"{self.title} ({self.assumes})" if self.assumes else self.title
        lines = [
            f"{named}: device {self.limit_bytes / gb:.3g} GB, headroom {self.headroom:.0%}, "
            f"static {self.memory.static_bytes / gb:.2f} GB",
            f"{'prompt' if prompts else 'longest':>8}  {'samples':>8}  {'tokens':>10}  {'GB at peak':>10}",
        ]
        lines += [f"{ln:>8}  {n:>8}  {t:>10}  {size / gb:>10.2f}" for ln, n, t, size in self.rows()]
        if not any(self.samples):
            return "\n".join([*lines, "not even one sample fits; " + WAY_OUT])
        longest = max(ln for ln, n in zip(self.lengths, self.samples, strict=True) if n)
        told = f"that is safe up to {longest} tokens a sample"
        if prompts:
            told = f"of lengths + {self.new_tokens} (prompts with what is generated) that is safe for prompts of up to {longest}"
        return "\n".join([*lines, f"a token budget {told}: {self.token_code}", self.code])

    def draw(self, axes: Axes) -> None:
        """Most samples over length, on log scales, into matplotlib axes."""
        fitting = [(length, count) for length, count in zip(self.lengths, self.samples, strict=True) if count]
        axes.loglog(*zip(*fitting, strict=True), marker="o") if fitting else None
        title = "\n".join(filter(None, (self.title, self.assumes)))
        axes.set(xlabel="tokens of the longest sample", ylabel="samples that fit", title=title)


def what_fits(
    model_or_config: Any,
    memory: str | int | None = None,
    *,
    mode: Mode = "train",
    headroom: float = 0.9,
    pad_to_multiple_of: int = 1,
    lengths: Sequence[int] | None = None,
    **how: Any,
) -> Fits:
    """How many samples of each length fit a device, from the model alone: it is traced, no weights are read.

    Args:
        model_or_config, memory, mode, headroom, pad_to_multiple_of, how: as in ``MemoryBudget.from_model``, which decides the
            same.
        lengths: tokens of the longest sample; default: powers of two from 128 that the model has positions for.

    Raises:
        ConfigError: an argument is wrong.

    >>> from transformers import GPT2Config
    >>> config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=1000, n_positions=512)
    >>> found = what_fits(config, "2GB", dtype="bf16")
    >>> found.lengths, found.code
    ((128, 256, 512), "MemoryBudget.from_model(model, '2GB', dtype='bf16')")
    """
    from dynagroup.device import free_bytes

    limit = free_bytes() if memory is None else parsed_bytes(memory)
    check_number("headroom", headroom, most=1.0)
    traced = TracedMemory.of(model_or_config, mode, **how).padded_to(pad_to_multiple_of)
    named = model_or_config if isinstance(model_or_config, str) else None
    return Fits.of(
        traced,
        limit,
        usual_lengths(model_or_config) if lengths is None else lengths,
        headroom=headroom,
        pad_to_multiple_of=pad_to_multiple_of,
        code=_code(named, memory, {"mode": mode, "headroom": headroom, "pad_to_multiple_of": pad_to_multiple_of}, how),
        title=named or "model",
        assumes=traced.assumes,
        new_tokens=new_tokens_of(traced.workload),
    )


def new_tokens_of(workload: Workload) -> int:
    """Tokens that are generated for each sample; 0 in training and in forward passes."""
    return (workload.max_new_tokens or 0) if workload.mode == "generate" else 0


def token_budget(memory: BytesMemoryModel, room: float, longest: int, *, multiple: int = 1, new_tokens: int = 0) -> int:
    """The most tokens under which every batch of samples of up to ``longest`` tokens takes at most ``room`` bytes.

    A token budget T allows T // C(L) samples of L tokens, where C counts what is generated, too, rounded up to ``multiple``.
    With M(L) the most that fit, T // C(L) <= M(L) for all L is T < (M(L) + 1) * C(L) for all L. One bisection.
    """
    layout: Layout = getattr(memory, "layout", "padded")
    if longest < 1:
        return 0
    if layout == "packed":  # one number says all
        left = room - memory.static_bytes
        most = largest_within(lambda total: memory.batch_bytes(BatchShape.of(1, total, total)) <= left, 1)
        return int(most[0]) // multiple * multiple
    lengths = np.arange(1, longest + 1)
    most = _most(memory, room, round_up(lengths, multiple), longest)
    return int(((most + 1) * round_up(lengths + new_tokens, multiple)).min() - 1)


def usual_lengths(model_or_config: Any) -> list[int]:
    """Powers of two from 128, as far as the model has positions, and then all of these.

    >>> from transformers import GPT2Config
    >>> usual_lengths(GPT2Config(n_positions=700))
    [128, 256, 512, 700]
    """
    from dynagroup.memory.trace.model import as_config, is_model

    config = model_or_config.config if is_model(model_or_config) else as_config(model_or_config)
    most = min(positions_of(config) or LENGTHS[-1], LENGTHS[-1])
    return [length for length in LENGTHS if length < most] + [most]


_USUAL = {"mode": "train", "headroom": 0.9, "pad_to_multiple_of": 1}


def _code(name: str | None, memory: str | int | None, said: Mapping[str, Any], how: Mapping[str, Any]) -> str:
    shown = [repr(name) if name is not None else "model", *([] if memory is None else [repr(memory)])]
    options = {k: v for k, v in said.items() if v != _USUAL[k]} | {k: v for k, v in how.items() if v is not None}
    options = {k: str(v).removeprefix("torch.") if type(v).__module__ == "torch" else v for k, v in options.items()}
    shown += [f"{k}={'rows' if k == 'measured' else repr(v)}" for k, v in options.items() if k != "inputs"]
    return f"MemoryBudget.from_model({', '.join(shown)})"
