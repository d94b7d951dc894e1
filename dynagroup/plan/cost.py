"""Predicts the time of a batch (its *work*), to cut windows and balance ranks. Work does not decide what fits.

Its unit, the *linear token*, is the time that a model's matrix products take for one token. Attention adds time that
grows with the square of a sample's length, and every step has a fixed cost."""

import math
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynagroup.budget.base import Budget, is_packed, padded_streams
from dynagroup.errors import ConfigError
from dynagroup.plan.batches import Batches, shapes_of
from dynagroup.shapes import TOKENS, Streams, primary
from dynagroup.validation import check_choice, check_number, warn_user

SAMPLED = 1 << 14  # lengths from which the median is estimated
CPU_PER_STEP = (
    128.0  # fixed cost of a step on a CPU, in linear tokens; measured, see ``docs/benchmarks.md``
)

Meet: TypeAlias = Literal["step", "stream"]
PATCHES = (
    "patches"  # name of the stream for which :meth:`Work.of` gives the price of a vision model
)
LAYER_KINDS = ("layer_types", "layers_block_type", "attention_layers")  # names in configs
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
        return work if self.unit == 1.0 else self.unit * work


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

    per_step: float = 1024.0
    crossover: float = 12_288.0
    streams: Mapping[str, Price] = field(default_factory=dict, hash=False)
    meet: Meet = "step"
    is_assumed: bool = False

    def __post_init__(self) -> None:
        check_number("per_step", self.per_step, or_zero=True)
        check_number("crossover", self.crossover, finite=False)
        check_choice("meet", self.meet, ("step", "stream"))
        if not isinstance(self.streams, Mapping) or not all(
            isinstance(p, Price) for p in self.streams.values()
        ):
            wanted = 'a dict from names to prices, {"patches": Price(unit=0.1)}'
            raise ConfigError(f"`streams` must be {wanted}, but is {self.streams!r}")

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
        layers_kinds = _Layers.of(config, two_stacks=sizes["encoder_decoder"])
        wanted = ["hidden_size", "num_layers"]
        if layers_kinds.attend:
            wanted += ["num_heads", "head_size"]
        missing = [name for name in wanted if not sizes[name]]
        if missing:
            way_out = "pass Work(per_step=..., crossover=6 * hidden size), or measure it: Work.fit"
            raise ConfigError(
                f"the config of {type(model_or_config).__name__} has no {', '.join(missing)}; {way_out}"
            )
        hidden = sizes["hidden_size"]
        layers = sizes["num_layers"] + sizes["num_encoder_layers"]
        width = hidden
        shared_heads = 1.0
        if layers_kinds.attend:
            width = sizes["num_heads"] * sizes["head_size"]
            shared_heads = sizes["num_kv_heads"] / sizes["num_heads"]
        mlp = (3 if sizes["gated_mlp"] else 2) * sizes["intermediate_size"]
        matrices = 2 * width * (1 + shared_heads) + mlp * sizes["experts_per_token"]
        stride, convolutions = _front_end(config)
        linear = 2.0 * hidden * (matrices + sizes["vocabulary_size"] / layers)
        linear += convolutions / layers
        per_token = 4.0 * width  # operations of attention in a layer for each token attended to
        everywhere = layers_kinds.everywhere
        in_window = per_token * layers_kinds.windowed * layers_kinds.window
        if in_window <= linear:
            linear += in_window
        else:  # samples are hardly longer than such a window
            everywhere += layers_kinds.windowed
        # Launching a layer's kernels takes as long as 9e10 operations; moving weights and gradients, as 256 tokens.
        per_step = float(np.clip(9e10 / linear, 256, 4096))
        if str(device).startswith("cpu"):
            per_step = CPU_PER_STEP
        crossover = linear / (per_token * everywhere) if everywhere else math.inf
        streams = _vision_tower(getattr(config, "vision_config", None), linear * layers)
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
        module, config = (
            sys.modules.get("transformers"),
            getattr(model, "config", None),
        )  # not imported here
        try:
            if module is not None and isinstance(config, module.PretrainedConfig):
                return cls.of(config, device=device)
        except ConfigError:
            pass
        per_step = CPU_PER_STEP if str(device).startswith("cpu") else 1024.0
        return cls(per_step=per_step, is_assumed=True)

    def for_plan(self, lengths: Streams, budget: Budget) -> "Work":
        """Returns this work for a plan of these lengths. With a budget of generation, a batch takes one step for each new
        token. If the model is not known, attention counts at most as much as everything else at the median length."""
        work = self
        if budget.new_tokens > 1:
            work = replace(work, per_step=work.per_step * budget.new_tokens)
        tokens = lengths[primary(lengths)]
        some = tokens[:: max(1, len(tokens) // SAMPLED)]  # a memory map may have a billion
        median = float(np.median(some)) if self.is_assumed and len(some) else 0.0
        if median > work.price(primary(lengths)).crossover:
            warn_user(
                f"the model is not known, and half of the samples are longer than {median:,.0f}: "
                "attention is assumed to take as long as everything else at this length; "
                "pass work=Work.of(model), or a measured Work.fit"
            )
            work = replace(work, crossover=median)
        return work

    @classmethod
    def fit(cls, rows: Iterable[tuple[int, int | Mapping[str, int], float]]) -> "Work":
        """Fits work to measured padded steps, each (samples, tokens of the longest sample, seconds).

        Instead of tokens, a step may have a dict by stream: ``{"tokens": 512, "patches": 1024}``. The fit is
        non-negative least squares on relative errors of ``seconds = a + sum(b * n * L + c * n * L**2)``. Raises
        ConfigError if there are fewer different shapes than coefficients, or a number is not positive.

        >>> work = Work(per_step=500, crossover=4000)
        >>> shapes = [(1, 100), (8, 100), (8, 1000), (2, 4000)]
        >>> fitted = Work.fit([(n, longest, 1e-5 * (500 + n * work.of_lengths(longest))) for n, longest in shapes])
        >>> round(fitted.per_step), round(fitted.crossover)
        (500, 4000)
        """
        table = [
            (s, n, longest if isinstance(longest, Mapping) else {TOKENS: longest})
            for n, longest, s in rows
        ]
        known = [*dict.fromkeys(name for *_, longest in table for name in longest)] or [TOKENS]
        names = sorted(known, key=lambda name: name != primary(known))
        numbers = np.asarray(
            [[s, n, *(longest.get(name, 0) for name in names)] for s, n, longest in table],
            np.float64,
        )
        numbers = numbers.reshape(-1, 2 + len(names))
        least, different = 1 + 2 * len(names), len(np.unique(numbers[:, 1:], axis=0))
        if different < least or not (
            np.isfinite(numbers).all() and (numbers[:, :3] > 0).all() and numbers.min() >= 0
        ):
            wanted, given = (
                f"at least {least} distinct shapes",
                f"{len(table)} rows of {different} shapes",
            )
            raise ConfigError(
                f"`rows` must have seconds above 0 for {wanted}, but has {given}; measure more shapes"
            )
        samples, units = numbers[:, 1:2], numbers[:, 2:]
        columns = np.hstack([samples**0, samples * units, samples * units**2]) / numbers[:, :1]
        start, *factors = _non_negative(columns.T @ columns, columns.sum(axis=0))
        each = zip(names, factors[: len(names)], factors[len(names) :], strict=True)
        prices = {
            name: Price(unit=b / factors[0], crossover=b / c if c else math.inf)
            for name, b, c in each
            if b
        }
        return cls(
            per_step=start / factors[0], crossover=prices.pop(names[0]).crossover, streams=prices
        )

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
            known = f"`lengths` has only {sorted(names)}; add the stream, or leave out its price"
            raise ConfigError(f"`work` has a price for the stream {missing[0]!r}, but {known}")
        return tuple(
            name for name in names if name in padded_streams(budget, names) or name in self.streams
        )

    def by_stream(self, batches: Batches, lengths: Streams, budget: Budget) -> NDArray[np.float64]:
        """Returns the work of every batch per :meth:`priced` stream, without fixed costs: float64 (B, streams)."""
        names, found = self.priced(budget, lengths), []
        padded = () if is_packed(budget, lengths) else padded_streams(budget, lengths)
        run = (
            budget.as_run(shapes_of(batches, {name: lengths[name] for name in padded}))
            if padded
            else None
        )
        for name in names if len(batches) else ():
            if run is not None and name in padded:
                found.append(run.num_samples * self.price(name).of(run.longest[name]))
            else:
                found.append(
                    np.add.reduceat(
                        self.price(name).of(lengths[name][batches.order]), batches.offsets[:-1]
                    )
                )
        return np.stack(found, axis=1) if found else np.zeros((0, len(names)))

    def of_batches(self, batches: Batches, lengths: Streams, budget: Budget) -> NDArray[np.float64]:
        """Returns the work of each batch, without fixed costs; ``batches`` are positions in ``lengths``."""
        return self.by_stream(batches, lengths, budget).sum(axis=1)

    def row_times(self, work: ArrayLike) -> NDArray[np.float64]:
        """Returns the predicted time of each step without its fixed cost, float64 (steps,): the largest work of a rank,
        or with ``meet="stream"`` the sum over streams of the largest. ``work``: (steps, ranks) or (steps, ranks, streams)."""
        found = np.asarray(work, np.float64)
        if found.ndim < 3:
            return found.max(axis=1, initial=0.0)
        each = found if self.meet == "stream" else found.sum(axis=2, keepdims=True)
        return each.max(axis=1, initial=0.0).sum(axis=1)

    def of_rows(self, work: ArrayLike) -> float:
        """Returns the predicted time of steps with their fixed cost; ``work`` as in :meth:`row_times`."""
        times = self.row_times(work)
        return float(self.per_step * len(times) + times.sum())


@dataclass(frozen=True)
class _Layers:
    """Which share of a model's layers attends to all tokens (``everywhere``), or to a ``window`` (``windowed``)."""

    everywhere: float = 1.0
    windowed: float = 0.0
    window: int = 0

    @property
    def attend(self) -> bool:
        return self.everywhere + self.windowed > 0

    @classmethod
    def of(cls, config: Any, *, two_stacks: bool) -> "_Layers":
        if two_stacks:
            return cls()
        text = (
            config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        )
        named = (getattr(text, name, None) for name in WINDOWS)
        windows = [size for size in named if size is not None]
        window = int(np.max(windows[0])) if windows else 0
        kinds = next(filter(None, (getattr(text, name, None) for name in LAYER_KINDS)), None)
        if kinds is None:
            return cls(everywhere=0.0, windowed=1.0, window=window) if window else cls()
        windowed = [kind.startswith(("sliding", "chunked", "local")) for kind in kinds]
        attends = [
            kind in ("hybrid", "global") or ("attention" in kind and "linear" not in kind)
            for kind in kinds
        ]
        everywhere = np.logical_and(attends, np.logical_not(windowed))
        return cls(float(np.mean(everywhere)), float(np.mean(windowed)), window)


def _front_end(config: Any) -> tuple[int, float]:
    """Returns how many units of the input become one position of a speech model, and the operations of the convolutions
    in front of it for each position."""
    num_layers = getattr(config, "num_conv_layers", 0)
    if isinstance(getattr(config, "conv_stride", None), (list, tuple)):
        strides = config.conv_stride
        kernels = config.conv_kernel
        channels = list(zip([1, *config.conv_dim], config.conv_dim, strict=False))
    elif num_layers > 0:  # Speech2Text: gated, so the next layer reads half of what a layer writes
        strides = [2] * num_layers
        kernels = config.conv_kernel_sizes
        more = num_layers - 1
        read = [config.input_feat_per_channel, *[config.conv_channels // 2] * more]
        written = [*[config.conv_channels] * more, 2 * config.d_model]
        channels = list(zip(read, written, strict=True))
    else:
        return 1, 0.0
    positions = math.prod(strides)
    operations = 0.0
    for stride, kernel, (read_channels, written_channels) in zip(
        strides, kernels, channels, strict=True
    ):
        positions //= stride
        operations += 2.0 * positions * kernel * read_channels * written_channels
    squeeze = getattr(config, "squeeze_factor", 1)
    return math.prod(strides) * squeeze, operations * squeeze


def _vision_tower(config: Any, of_token: float) -> dict[str, Price]:
    """Returns the price of a vision patch, from the config: its operations per layer, relative to those of a token, are
    ``2 * (4 * width**2 + matrices * width * inner)``, and in full attention ``4 * width`` per patch attended to."""

    def first(*names: str) -> Any:
        return next(
            (value for name in names if (value := getattr(config, name, None)) is not None), None
        )

    width, layers = first("embed_dim", "hidden_size"), first("depth", "num_hidden_layers")
    if not width or not layers:
        return {}
    inner = first("intermediate_size") or int((first("mlp_ratio") or 4) * width)
    weights = 2.0 * (
        4 * width**2
        + (3 if first("hidden_act", "hidden_activation") == "silu" else 2) * width * inner
    )
    wide = (
        len(first("fullatt_block_indexes") or range(layers)) / layers
    )  # other layers attend only in small windows
    return {
        PATCHES: Price(unit=layers * weights / of_token, crossover=weights / (4.0 * width * wide))
    }


# Non-negative least squares (Lawson and Hanson 1974) by trying all 2**columns sets of factors above 0. Columns are
# scaled, because squares are 10**7 times a constant. A square is used only together with its linear column.
def _non_negative(products: NDArray[np.float64], targets: NDArray[np.float64]) -> list[float]:
    """Returns one factor per column (the second above 0, others 0 or more) that make ``1 - columns @ factors`` smallest.

    Args:
        products, targets: ``columns.T @ columns`` and the columns' sums; columns: a constant, units, squares."""
    count, scale = len(targets), np.sqrt(np.maximum(np.diag(products), 1e-100))
    scaled, wanted = products / np.outer(scale, scale), targets / scale
    found, least, squares = np.zeros(count), math.inf, count // 2
    for used in chain.from_iterable(
        combinations(range(count), size) for size in range(count, 0, -1)
    ):
        if 1 in used and all(column - squares in used for column in used if column > squares):
            tried = np.zeros(count)
            tried[list(used)] = np.linalg.lstsq(
                scaled[np.ix_(used, used)], wanted[list(used)], rcond=None
            )[0]
            error = float(tried @ scaled @ tried - 2 * wanted @ tried)
            if (tried >= 0).all() and tried[1] > 0 and error < least:
                found, least = tried, error
    return (found / scale).tolist()


DEFAULT_WORK = Work()


def check_work(work: Work | None = None) -> Work:
    """Returns ``work``, or for None the default for this machine's device. ConfigError: it is no Work."""
    if isinstance(work, Work):
        return work
    if work is not None:
        raise ConfigError(f"`work` must be a Work, such as Work.of(model), but is {work!r}")
    import torch  # heavy

    on_cpu = not any(getattr(torch, name).is_available() for name in ("cuda", "xpu", "mps"))
    return Work.of_known(None, device="cpu" if on_cpu else "")
