"""Predicts the time of a batch (its *work*), to cut windows and balance ranks. Work does not decide what fits.

Its unit, the *linear token*, is the time that a model's matrix products take for one token. Attention adds time that
grows with the square of a sample's length, and every step has a fixed cost."""

import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynagroup.budget.base import Budget, is_packed, padded_streams
from dynagroup.errors import ConfigError
from dynagroup.memory.phases import needed
from dynagroup.plan.batches import Batches, shapes_of
from dynagroup.shapes import TOKENS, Streams, primary
from dynagroup.validation import check_choice, check_number, warn_user

SAMPLED = 1 << 14  # lengths from which the median is estimated
GPU_PER_STEP = 1024.0  # fixed cost of a step of a small decoder on a fast GPU, in linear tokens
CPU_PER_STEP = 128.0  # the same on a CPU; measured, see ``docs/benchmarks.md``

Meet: TypeAlias = Literal["step", "stream"]
# Names in configs: the kind of each layer, and the tokens that a layer of limited attention attends to.
LAYER_KINDS = ("layer_types", "layers_block_type", "attention_layers")
WINDOWS = (
    "local_attention",
    "sliding_window",
    "attention_window",
    "attention_chunk_size",
    "window_size",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """The time of a sample with ``u`` units of one stream: ``unit * (u + u**2 / crossover)`` linear tokens.

    Args:
        unit: float above 0, linear tokens per unit.
        crossover: float, units at which attention takes as long as everything else; ``math.inf``: no attention.

    >>> Price(unit=0.5, crossover=100).of([10, 100]).tolist()
    [5.5, 100.0]
    """

    unit: float = 1.0
    crossover: float = math.inf

    def __post_init__(self) -> None:
        check_number("unit", self.unit)
        check_number("crossover", self.crossover, finite=False)

    def of(self, units: ArrayLike) -> NDArray[np.float64]:
        """Returns the linear tokens of samples with these numbers of units: float64 (N,)."""
        linear = np.asarray(units, np.float64)
        work = linear + linear * linear / self.crossover
        if self.unit == 1.0:  # saves a pass over all lengths
            return work
        return self.unit * work


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The time of a batch: ``per_step + n * (L + L**2 / crossover)``, packed ``per_step + sum(l + l**2 / crossover)``.

    Streams are added. Streams that count as tokens (of an encoder or decoder) cost as much as tokens, unless they have
    a price of their own. Streams with an :class:`~dynagroup.AdditiveCap` cost their own price, or nothing.

    Args:
        per_step: float, fixed cost of a step in linear tokens, for launching kernels and reducing gradients.
        crossover: float, tokens at which attention takes as long as everything else; ``math.inf``: no attention.
        streams: prices by stream, such as ``{"patches": Price(unit=0.1)}``. ConfigError: none of several streams has that name.
            A price of ``tokens`` is for lengths in other units than the model's positions, such as samples of a waveform.
        meet: where ranks wait for each other. "step": at the end of a step (DDP), which takes the largest work of a
            rank. "stream": in every layer (FSDP, ZeRO-3), which takes the sum over streams of the largest work.
        is_assumed: True: the model is not known. In plans, attention then takes at most as long as everything else for a
            sample of median length, and a warning says so.

    >>> Work(per_step=100, crossover=1000).of_lengths([10, 1000]).tolist()
    [10.1, 2000.0]
    >>> work = Work(per_step=0, streams={"patches": Price(unit=0.1)}, meet="stream")
    >>> work.of_rows([[[90, 40], [60, 70]]])  # one step of two ranks: tokens and patches, in linear tokens
    160.0
    """

    per_step: float = GPU_PER_STEP
    crossover: float = 12_288.0
    streams: Mapping[str, Price] = field(default_factory=dict, hash=False)
    meet: Meet = "step"
    is_assumed: bool = False

    def __post_init__(self) -> None:
        check_number("per_step", self.per_step, or_zero=True)
        check_number("crossover", self.crossover, finite=False)
        check_choice("meet", self.meet, ("step", "stream"))
        is_mapping = isinstance(self.streams, Mapping)
        if not is_mapping or not all(isinstance(p, Price) for p in self.streams.values()):
            raise ConfigError(
                '`streams` must be a dict from names to prices, {"patches": Price(unit=0.1)}, '
                f"but is {self.streams!r}"
            )

    @classmethod
    def of(cls, model_or_config: Any, *, device: Any = "cuda") -> "Work":
        """Returns the work of a ``transformers`` model from its config. Measured times are better, see :meth:`fit`.

        A token takes 2 operations per weight of a layer's matrices and of the output matrix; attention takes ``4 *
        heads * head size`` per token attended to. Their ratio is the crossover; the docs derive ``per_step``. Layers
        without attention, windows, and convolutions in front of a speech model are read from the config.

        Args:
            model_or_config: a model, or its config.
            device: where the model runs: a ``torch.device`` or its name.
        """
        from dynagroup.memory.trace.model import architecture

        config = getattr(model_or_config, "config", model_or_config)
        sizes = architecture(config)
        attention = _Attention.of(config, two_stacks=sizes["encoder_decoder"])
        wanted = ["hidden_size", "num_layers"]
        if attention.share:
            wanted += ["num_heads", "head_size"]
        missing = [name for name in wanted if not sizes[name]]
        if missing:
            raise ConfigError(
                f"the config of {type(model_or_config).__name__} has no {', '.join(missing)}; "
                "pass Work(per_step=..., crossover=6 * hidden size), or measure it: Work.fit"
            )
        hidden = sizes["hidden_size"]
        num_layers = sizes["num_layers"] + sizes["num_encoder_layers"]
        width = hidden
        shared_heads = 1.0
        if attention.share:
            width = sizes["num_heads"] * sizes["head_size"]
            shared_heads = sizes["num_kv_heads"] / sizes["num_heads"]
        num_mlp_matrices = 3 if sizes["gated_mlp"] else 2
        mlp = num_mlp_matrices * sizes["intermediate_size"] * sizes["experts_per_token"]
        matrices = 2 * width * (1 + shared_heads) + mlp
        stride, convolutions = _convolutions(config)
        # Operations of a layer for a token, without attention; and of attention for each token attended to.
        linear = 2.0 * hidden * (matrices + sizes["vocabulary_size"] / num_layers)
        linear += convolutions / num_layers
        per_token = 4.0 * width
        everywhere = attention.everywhere
        in_window = per_token * attention.windowed * attention.window
        if in_window <= linear:
            linear += in_window
        else:  # samples are hardly longer than such a window
            everywhere += attention.windowed
        # Launching a layer's kernels takes as long as 9e10 operations; moving weights and gradients, as 256 tokens.
        per_step = float(np.clip(9e10 / linear, 256, 4096))
        if str(device).startswith("cpu"):
            per_step = CPU_PER_STEP
        crossover = linear / (per_token * everywhere) if everywhere else math.inf
        streams = {}
        if stride > 1:
            streams[TOKENS] = Price(unit=1.0 / stride, crossover=stride * crossover)
        reads_waveforms = getattr(model_or_config, "main_input_name", "") == "input_values"
        return cls(
            per_step=per_step,
            crossover=crossover,
            streams=streams,
            is_assumed=reads_waveforms and stride == 1,
        )

    @classmethod
    def of_known(cls, model: Any, *, device: Any) -> "Work":
        """Works like :meth:`of`, but returns the device's default for a model of unknown sizes.

        >>> Work.of_known(object(), device="cpu").per_step == CPU_PER_STEP
        True
        """
        transformers = sys.modules.get("transformers")  # not imported here
        config = getattr(model, "config", None)
        if transformers is not None and isinstance(config, transformers.PretrainedConfig):
            try:
                return cls.of(config, device=device)
            except ConfigError:
                pass
        on_cpu = str(device).startswith("cpu")
        return cls(per_step=CPU_PER_STEP if on_cpu else GPU_PER_STEP, is_assumed=True)

    def for_plan(self, lengths: Streams, budget: Budget) -> "Work":
        """Returns this work for a plan of these lengths. With a budget of generation, a batch takes one step for each new
        token. If the model is not known, attention counts at most as much as everything else at the median length."""
        work = self
        if budget.new_tokens > 1:
            work = replace(work, per_step=work.per_step * budget.new_tokens)
        if not self.is_assumed:
            return work
        tokens = lengths[primary(lengths)]
        some = tokens[:: max(1, len(tokens) // SAMPLED)]  # a memory map may have a billion
        median = float(np.median(some)) if len(some) else 0.0
        if median <= work.price(primary(lengths)).crossover:
            return work
        warn_user(
            f"the model is not known, and half of the samples are longer than {median:,.0f}: "
            "attention is assumed to take as long as everything else at this length; "
            "pass work=Work.of(model), or a measured Work.fit"
        )
        return replace(work, crossover=median)

    @classmethod
    def fit(cls, rows: Iterable[tuple[int, int | Mapping[str, int], float]]) -> "Work":
        """Fits work to measured padded steps, each (samples, tokens of the longest sample, seconds). Needs scipy.

        Instead of tokens, a step may have a dict by stream: ``{"tokens": 512, "patches": 1024}``. The fit is
        non-negative least squares on relative errors of ``seconds = a + sum(b * n * L + c * n * L**2)``. Raises
        ConfigError if there are fewer different shapes than coefficients, or a number is not positive.

        >>> work = Work(per_step=500, crossover=4000)
        >>> shapes = [(1, 100), (8, 100), (8, 1000), (2, 4000)]
        >>> fitted = Work.fit([(n, longest, 1e-5 * (500 + n * work.of_lengths(longest))) for n, longest in shapes])
        >>> round(fitted.per_step), round(fitted.crossover)
        (500, 4000)
        """
        steps = _Measured.read(rows)
        # A square's column also has the linear term, so that a stream with attention has a crossover of at least 1.
        linear = steps.samples * steps.units
        squared = linear * (1.0 + steps.units)
        columns = np.hstack([np.ones_like(steps.samples), linear, squared]) / steps.seconds
        scale = np.maximum(np.linalg.norm(columns, axis=0), 1e-100)  # squares are 10**7 constants
        nnls = needed("scipy.optimize", "Work.fit").nnls
        factors = nnls(columns / scale, np.ones(len(columns)))[0] / scale
        count = len(steps.streams)
        of_squares = factors[1 + count :]
        of_units = factors[1 : 1 + count] + of_squares
        per_token = of_units[0]
        if not per_token:
            raise ConfigError(
                "`rows` must have steps that take longer with more tokens, but have not; measure more shapes"
            )
        prices = {}
        for name, unit, square in zip(steps.streams, of_units, of_squares, strict=True):
            if unit:
                crossover = float(unit / square) if square else math.inf
                prices[name] = Price(unit=float(unit / per_token), crossover=crossover)
        first = prices.pop(steps.streams[0])
        per_step = float(factors[0] / per_token)
        return cls(per_step=per_step, crossover=first.crossover, streams=prices)

    def price(self, stream: str) -> Price:
        """Returns the price of one unit of this stream: its own, or that of a token."""
        return self.streams.get(stream, Price(crossover=self.crossover))

    def of_lengths(self, tokens: ArrayLike | Mapping[str, ArrayLike]) -> NDArray[np.float64]:
        """Returns the work of samples of these lengths in linear tokens, without fixed costs: float64 (N,)."""
        named = tokens if isinstance(tokens, Mapping) else {TOKENS: tokens}
        return np.sum([self.price(name).of(values) for name, values in named.items()], axis=0)

    def priced(self, budget: Budget, names: Collection[str]) -> tuple[str, ...]:
        """Returns the streams that take time: those that count as tokens, and those that have a price."""
        missing = [name for name in self.streams if name not in (*names, TOKENS)]
        if missing and len(names) > 1:
            raise ConfigError(
                f"`work` has a price for the stream {missing[0]!r}, but `lengths` has only "
                f"{sorted(names)}; add the stream, or leave out its price"
            )
        padded = padded_streams(budget, names)
        return tuple(name for name in names if name in padded or name in self.streams)

    def by_stream(self, batches: Batches, lengths: Streams, budget: Budget) -> NDArray[np.float64]:
        """Returns the work of every batch per :meth:`priced` stream, without fixed costs: float64 (B, streams)."""
        names = self.priced(budget, lengths)
        if not len(batches) or not names:
            return np.zeros((0, len(names)))
        if is_packed(budget, lengths):
            padded = {}
        else:
            padded = {name: lengths[name] for name in padded_streams(budget, lengths)}
        by_stream = []
        run = budget.as_run(shapes_of(batches, padded)) if padded else None
        for name in names:
            price = self.price(name)
            if run is not None and name in padded:
                work = run.num_samples * price.of(run.longest[name])
            else:
                each = price.of(lengths[name][batches.order])
                work = np.add.reduceat(each, batches.offsets[:-1])
            by_stream.append(work)
        return np.stack(by_stream, axis=1)

    def of_batches(self, batches: Batches, lengths: Streams, budget: Budget) -> NDArray[np.float64]:
        """Returns the work of each batch, without fixed costs; ``batches`` are positions in ``lengths``."""
        return self.by_stream(batches, lengths, budget).sum(axis=1)

    def row_times(self, work: ArrayLike) -> NDArray[np.float64]:
        """Returns the predicted time of each step without its fixed cost, float64 (steps,): the largest work of a rank,
        or with ``meet="stream"`` the sum over streams of the largest. ``work``: (steps, ranks) or (steps, ranks, streams)."""
        by_rank = np.asarray(work, np.float64)
        if by_rank.ndim < 3:
            return by_rank.max(axis=1, initial=0.0)
        if self.meet == "step":
            by_rank = by_rank.sum(axis=2, keepdims=True)
        return by_rank.max(axis=1, initial=0.0).sum(axis=1)

    def of_rows(self, work: ArrayLike) -> float:
        """Returns the predicted time of steps with their fixed cost; ``work`` as in :meth:`row_times`."""
        times = self.row_times(work)
        return float(self.per_step * len(times) + times.sum())


@dataclass(frozen=True)
class _Measured:
    """Steps that were measured, the primary stream first: ``units`` of the longest sample by stream."""

    streams: Sequence[str]
    seconds: NDArray[np.float64]  # (steps, 1)
    samples: NDArray[np.float64]  # (steps, 1)
    units: NDArray[np.float64]  # (steps, streams)

    @classmethod
    def read(cls, rows: Iterable[tuple[int, int | Mapping[str, int], float]]) -> "_Measured":
        """Raises ConfigError if there are too few different shapes, or a number is not positive."""
        steps = []
        names: dict[str, None] = {}
        for num_samples, longest, seconds in rows:
            units = longest if isinstance(longest, Mapping) else {TOKENS: longest}
            steps.append((seconds, num_samples, units))
            names.update(dict.fromkeys(units))
        streams = list(names) or [TOKENS]
        first = primary(streams)
        streams.sort(key=lambda name: name != first)
        table = np.zeros((len(steps), 2 + len(streams)))
        for row, (seconds, num_samples, units) in zip(table, steps, strict=True):
            row[:] = [seconds, num_samples, *(units.get(name, 0) for name in streams)]
        num_coefficients = 1 + 2 * len(streams)
        num_shapes = len(np.unique(table[:, 1:], axis=0))
        is_positive = (table[:, :3] > 0).all() and (table >= 0).all() and np.isfinite(table).all()
        if num_shapes < num_coefficients or not is_positive:
            raise ConfigError(
                f"`rows` must have seconds above 0 for at least {num_coefficients} distinct shapes, "
                f"but has {len(table)} rows of {num_shapes} shapes; measure more shapes"
            )
        return cls(streams, table[:, :1], table[:, 1:2], table[:, 2:])


@dataclass(frozen=True)
class _Attention:
    """Which share of a model's layers attends to all tokens (``everywhere``), or to a ``window`` (``windowed``)."""

    everywhere: float = 1.0
    windowed: float = 0.0
    window: int = 0

    @property
    def share(self) -> float:
        """Share of the layers that have attention."""
        return self.everywhere + self.windowed

    @classmethod
    def of(cls, config: Any, *, two_stacks: bool) -> "_Attention":
        if two_stacks:
            return cls()
        text = config
        if hasattr(config, "get_text_config"):
            text = config.get_text_config(decoder=True)
        sizes = _first(text, WINDOWS)
        window = 0 if sizes is None else int(np.max(sizes))
        kinds = _first(text, LAYER_KINDS)
        if not kinds:
            return cls(everywhere=0.0, windowed=1.0, window=window) if window else cls()
        num_everywhere = 0
        num_windowed = 0
        for kind in kinds:
            if kind.startswith(("sliding", "chunked", "local")):
                num_windowed += 1
            elif kind in ("hybrid", "global") or ("attention" in kind and "linear" not in kind):
                num_everywhere += 1
        return cls(num_everywhere / len(kinds), num_windowed / len(kinds), window)


def _first(config: Any, names: Iterable[str]) -> Any:
    """Returns the first value that a config has under one of these names; None: it has none."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None


def _convolutions(config: Any) -> tuple[int, float]:
    """Returns how many units of the input become one position of a speech model, and the operations of the convolutions
    in front of it for each position."""
    from dynagroup.memory.trace.audio import convolutions, stride_of

    layers = convolutions(config)
    stride = stride_of(layers)
    positions = stride
    operations = 0.0
    for layer in layers:
        positions //= layer.stride
        operations += 2.0 * positions * layer.kernel * layer.num_read * layer.num_written
    squeeze = getattr(config, "squeeze_factor", 1)
    return stride * squeeze, operations * squeeze


DEFAULT_WORK = Work()


def check_work(work: Work | None = None) -> Work:
    """Returns ``work``, or for None the default for this machine's device. ConfigError: it is no Work."""
    if isinstance(work, Work):
        return work
    if work is not None:
        raise ConfigError(f"`work` must be a Work, such as Work.of(model), but is {work!r}")
    return Work.of_known(None, device=local_device())


def local_device() -> str:
    """Returns the type of the device that a training on this machine would use: "cuda", "xpu", "mps" or "cpu"."""
    import torch  # heavy

    for name in ("cuda", "xpu", "mps"):
        if getattr(torch, name).is_available():
            return name
    return "cpu"
