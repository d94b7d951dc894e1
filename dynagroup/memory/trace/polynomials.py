"""Finds how a model's memory depends on the batch shape, exactly, from a few traces of the model.

A trace runs the model without data and records the bytes alive after each allocation. Each of these values is
a polynomial in (n samples, L tokens), so a few traces determine it (least squares, error 0). The peak of a
batch is the largest of the polynomials, called phases. If all layers have one class, only the first are
traced, up to two of those at the end that are alike: every further layer adds the same bytes, from its
forward pass to the end of its backward pass."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from dynagroup.memory.phases import MONOMIALS, FloatArray, MakeInputs, Phases, Run, monomials
from dynagroup.memory.trace.audio import (
    Convolution,
    convolutions,
    shortest_input,
    stride_of,
)
from dynagroup.memory.trace.kernels import LiveBytes
from dynagroup.memory.trace.model import (
    ALIKE_LAYERS,
    as_meta_model,
    modules_that_checkpoint,
    positions_of,
    stacks,
    text_config,
)
from dynagroup.memory.trace.program import own_settings, prepare, trace
from dynagroup.shapes import TARGET, TOKENS


class Probe(NamedTuple):
    """A shape to trace."""

    num_samples: int
    tokens: int
    target_tokens: int


Timeline: TypeAlias = Callable[[Probe], FloatArray]
"""Returns the bytes alive after each allocation."""

ALIKE = 5e-3  # largest relative error of a peak that is computed from a few layers
EXACT = 1e-4  # largest error of a polynomial, relative to the largest value of its trace
# CUDA kernels pad rows to multiples of 32 and masks to multiples of 16. Traced lengths are multiples of 32 plus
# 1, so all get the most padding. A program that pads to 64 or 512 gives no polynomial at these lengths, and so
# is noticed.
ALIGNMENT = 32
PROBES = [
    Probe(2, 65, 97),
    Probe(3, 33, 33),
    Probe(2, 257, 161),
    Probe(5, 193, 97),
    Probe(4, 321, 65),
    Probe(3, 481, 257),
    Probe(7, 97, 353),
    Probe(2, 161, 481),
    Probe(6, 65, 257),
    Probe(3, 129, 321),
    Probe(6, 385, 449),
    Probe(5, 449, 129),
    Probe(2, 33, 33),
    Probe(8, 225, 289),
]
PACKED_PROBES = [Probe(1, tokens, 0) for tokens in (65, 513, 193, 1025)]
PROBED = 512  # about the longest length in PROBES, in tokens
# Tokens of the last traced shape, if the model has so many positions: checks long samples.
LONGEST = 4097
MIN_POSITIONS = 3 * ALIGNMENT + 1  # three traced lengths determine a polynomial of degree 2
# In a sample or packed batch; polynomials that are the largest only above this are dropped.
MAX_TOKENS = 131072
MAX_SAMPLES = 16384
NUM_DRAWN = 6000  # random shapes by which it is decided which polynomials are kept


def trace_phases(model: Any, workload: Run, *, inputs: MakeInputs | None = None) -> Phases:
    """Returns how a model's memory depends on the batch shape: polynomials from about eight traces of a few layers.

    Sliding-window attention gives two sets: for samples within the window, and for longer ones. ValueError: the model's
    operations depend on the shape, or its memory is no polynomial of it."""
    padded = _Traced(model, workload, inputs)
    with own_settings():
        phases = _phases(padded)
        # Lengths of waveforms say nothing of the masks, which are as long as what the convolutions leave.
        if workload.attention != "sdpa" or padded.packed or padded.convolutions:
            return phases
        aligned = _phases(replace(padded, beyond=0))
    return phases if aligned == phases else replace(phases, aligned=aligned)


@dataclass(frozen=True)
class _Traced:
    """A model, and the settings of its traces."""

    source: Any
    workload: Run
    inputs: MakeInputs | None
    beyond: int = 1  # traced lengths are multiples of 32 plus this many tokens

    @property
    def packed(self) -> bool:
        return self.workload.layout == "packed"

    @property
    def two_streams(self) -> bool:
        return bool(self.workload.encoder_decoder) and self.workload.mode != "generate"

    @property
    def columns(self) -> list[int]:
        """Indices of the monomials that can occur. A packed batch is one row with all its tokens."""
        names = MONOMIALS[:6]
        if self.packed:
            names = ("1", "L", "L2")
        elif self.two_streams:
            names = MONOMIALS
        return [MONOMIALS.index(name) for name in names]

    @property
    def config(self) -> Any:
        return text_config(self.source.config)

    @cached_property
    def convolutions(self) -> list[Convolution]:
        """Convolutions in front of the model. Traced lengths are the shortest ones that leave so many positions."""
        return convolutions(self.source.config)

    def model(self, depths: Sequence[int] = ()) -> torch.nn.Module:
        """Returns the model, ready to trace, with all layers, or at most ``depths`` layers in each stack."""
        workload = self.workload
        model = as_meta_model(self.source, dtype=workload.dtype, attention=workload.attention)
        for stack, depth in zip(stacks(model), depths, strict=False):
            del stack[depth:]
        return prepare(model, workload)

    def run(self, model: torch.nn.Module, probe: Probe, watch: Any = None) -> LiveBytes:
        longest = {TOKENS: probe.tokens}
        if self.two_streams:
            longest[TARGET] = probe.target_tokens
        return trace(
            model,
            self.workload,
            probe.num_samples,
            longest,
            inputs=self.inputs,
            watch=watch,
            smooth=True,
        )

    def timeline(self, check: Probe) -> Timeline:
        """Returns a function from shapes to timelines; it traces a few layers if their peak is right for ``check``."""
        whole = self.model()
        # What a layer's cache keeps decides its memory only if there is a cache.
        windows = _windows(self.config) if self.workload.mode == "generate" else []
        layers = [len(stack) for stack in stacks(whole)]
        depths = [_depth(stack, windows) for stack in stacks(whole)]

        def all_layers(probe: Probe) -> FloatArray:
            return np.array(self.run(whole, probe).timeline, dtype=np.float64)

        if all(depth + 1 >= count for depth, count in zip(depths, layers, strict=True)):
            return all_layers
        shallow = self.model(depths)

        def few_layers(probe: Probe) -> FloatArray:
            deepen = _Deepen(shallow, layers, self.workload)
            return deepen.raised(self.run(shallow, probe, watch=deepen.watching))

        with suppress(ValueError, KeyError):  # layers are not equal, so all of them are traced
            if abs(few_layers(check).max() / all_layers(check).max() - 1) < ALIKE:
                return few_layers
        return all_layers


def _depth(stack: torch.nn.ModuleList, windows: Sequence[int | None]) -> int:
    """Returns how many layers to trace: all up to two of those at the end that are alike."""
    if len(windows) != len(stack):
        windows = [None] * len(stack)
    kinds = [_layer_kind(layer, window) for layer, window in zip(stack, windows, strict=True)]
    num_traced = ALIKE_LAYERS
    for place, kind in enumerate(kinds):
        if kind != kinds[-1]:
            num_traced = max(num_traced, place + 3)
    return num_traced


def _layer_kind(layer: torch.nn.Module, window: int | None) -> list[Any]:
    """Returns what decides a layer's memory: two layers are alike if these lists are equal."""
    kind: list[Any] = [window, len(modules_that_checkpoint(layer))]
    for parameter in layer.parameters():
        kind.append((parameter.shape, parameter.dtype, parameter.requires_grad))
    for module in layer.modules():
        for name, value in vars(module).items():
            if name == "p" or "drop" in name:
                kind.append(value)
    return kind


@dataclass
class _Span:
    """Where the last two layers of a stack (0 and 1) lie in a timeline."""

    starts: dict[int, int] = field(default_factory=dict)
    """Allocations before each of the two layers first runs."""
    live: dict[int, int] = field(default_factory=dict)
    """Bytes alive before each of them first runs."""
    end: int | None = None
    """Allocations before the gradient of the last layer's input is known; None: never."""


class _Deepen:
    """Computes the timeline of a model with so many ``layers`` from a trace of a few, by watching the last two."""

    def __init__(self, model: torch.nn.Module, layers: Sequence[int], workload: Run) -> None:
        self._stacks = stacks(model)
        self._layers = layers
        # With gradient checkpointing, weights that autocast casts live in its cache until the forward pass ends.
        self._drops_casts = bool(workload.autocast and workload.gradient_checkpointing)
        self._spans = [_Span() for _ in self._stacks]

    @contextmanager
    def watching(self, tracer: LiveBytes) -> Iterator[None]:
        handles = []
        for stack, span in zip(self._stacks, self._spans, strict=True):
            for place, layer in enumerate(stack[-2:]):
                hook = _noting(tracer, span, place)
                handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        yield
        for handle in handles:
            handle.remove()

    def raised(self, tracer: LiveBytes) -> FloatArray:
        """Returns the timeline of the model with all its layers, by adding what each further layer keeps."""
        timeline = np.array(tracer.timeline, dtype=np.float64)
        never = (len(timeline), 0)
        prefilled, bytes_at_prompt = tracer.marks.get("prefilled", never)
        _, bytes_at_full = tracer.marks.get("stretched", never)
        for stack, num_layers, span in zip(self._stacks, self._layers, self._spans, strict=True):
            if len(span.live) < 2:
                raise ValueError("a layer was not run")
            num_added = num_layers - len(stack)
            kept = span.live[1] - span.live[0]
            end = len(timeline) if span.end is None else span.end
            timeline[span.starts[1] : min(end, prefilled)] += kept * num_added
            if self._drops_casts:
                forward_end, _ = tracer.marks["forward_ends"]
                timeline[forward_end:end] -= _cast_bytes(stack[-2]) * num_added
            if kept:  # the stack with the cache, which grows from the prompt's to the final length
                growth = (bytes_at_full - bytes_at_prompt) / len(stack)
                timeline[prefilled:] += (kept + growth) * num_added
        return timeline


def _noting(tracer: LiveBytes, span: _Span, place: int) -> Callable[..., None]:
    """Returns a hook for one of the last two layers, which notes when the layer first begins; for the last one also when
    its backward pass ends."""

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if place in span.live:
            return
        span.starts[place] = len(tracer.timeline)
        span.live[place] = tracer.live
        hidden = args[0] if args else kwargs.get("hidden_states")
        if place == 1 and hidden is not None and hidden.requires_grad:
            hidden.register_hook(note_end)

    def note_end(_: Any) -> None:
        span.end = len(tracer.timeline)

    return note


def _cast_bytes(layer: torch.nn.Module) -> int:
    """Returns the bytes that autocast needs for a lower copy of the layer's matrices."""
    num_bytes = 0
    for module in layer.modules():
        parameters = dict(module.named_parameters(recurse=False))
        if "weight" not in parameters or parameters["weight"].ndim != 2:
            continue
        for p in parameters.values():
            if p.dtype == torch.float32 and p.requires_grad:
                num_bytes += 2 * p.numel()
    return num_bytes


def _phases(traced: _Traced) -> Phases:
    if traced.packed:
        return _exact(traced, PACKED_PROBES)
    window = max((size for size in _windows(traced.config) if size), default=None)
    if window is None:
        return _exact(traced, _probes(traced))
    workload = traced.workload
    num_generated = (workload.max_new_tokens or 1) if workload.mode == "generate" else 1
    until = window - num_generated
    beyond_window = -(-window // ALIGNMENT) * ALIGNMENT
    long_probes = [probe._replace(tokens=probe.tokens + beyond_window) for probe in _probes(traced)]
    after = _exact(traced, long_probes)
    if until < MIN_POSITIONS:
        return after
    within = _exact(traced, _probes(traced, until))
    return replace(within, until=until, after=after.rows)


def _probes(traced: _Traced, within: int = LONGEST) -> list[Probe]:
    """Returns shapes to trace, enough to find all coefficients, within the model's positions; the last is the longest."""
    config = traced.config
    most = min(positions_of(config) or LONGEST, within)
    most_target = min(positions_of(config, "max_target_positions") or most, most)
    scaled = []
    for probe in PROBES:
        tokens = shortest_input(traced.convolutions, _scaled(probe.tokens, most, traced))
        target_tokens = _scaled(probe.target_tokens, most_target, traced)
        scaled.append(Probe(probe.num_samples, tokens, target_tokens))
    columns = traced.columns
    for count in range(len(columns) + 1, len(scaled) + 1):
        probes = scaled[:count]
        longest = shortest_input(traced.convolutions, _aligned(most, traced))
        longest = max(probes[-1].tokens, longest)
        probes[-1] = probes[-1]._replace(tokens=longest)
        known = _monomials(probes, columns)
        if np.linalg.matrix_rank(known / known.max(axis=0)) == len(columns):
            return probes
    raise ValueError(
        f"the model's {min(most, most_target)} positions are too few to find how memory grows with length"
    )


def _scaled(length: int, most: int, traced: _Traced) -> int:
    """Returns a probe's length, shortened in proportion to the model's positions if they are few."""
    if most < PROBED:
        length = most * length // PROBED
    return _aligned(length, traced)


def _aligned(length: int, traced: _Traced) -> int:
    """Returns the largest length up to ``length`` that is ``traced.beyond`` more than a multiple of 32."""
    return max((length - traced.beyond) // ALIGNMENT, 1) * ALIGNMENT + traced.beyond


def _monomials(probes: Sequence[Probe], columns: Sequence[int]) -> FloatArray:
    samples, tokens, target_tokens = np.array(probes).T
    return monomials(samples, tokens, target_tokens)[:, columns]


def _windows(config: Any) -> list[int | None]:
    """Returns for each layer how many positions its cache keeps; None: all, as the layer has no sliding window."""
    from transformers import DynamicCache, PretrainedConfig

    if not isinstance(config, PretrainedConfig):
        return []
    layers = DynamicCache(config=config).layers
    return [getattr(layer, "sliding_window", None) for layer in layers]


def _exact(traced: _Traced, probes: Sequence[Probe]) -> Phases:
    """Traces these shapes; returns their exact polynomials. ValueError: memory is no polynomial of the shape."""
    timeline = traced.timeline(probes[-1])
    timelines: list[FloatArray] = []
    for probe in _with_progress(probes):
        timelines.append(timeline(probe))
        # Fails early, because tracing a loop over tokens takes minutes.
        if len(timelines[0]) != len(timelines[-1]):
            raise ValueError(
                "its operations depend on the shape (allocations for "
                f"{tuple(probe)} and {tuple(probes[0])} differ)"
            )
    known = _monomials(probes, traced.columns)
    observed = np.array(timelines)
    scale = known.max(axis=0)
    scaled_coefficients = np.linalg.lstsq(known / scale, observed, rcond=None)[0]
    coefficients = scaled_coefficients / scale[:, None]
    errors = np.abs(known @ coefficients - observed).max(axis=1) / observed.max(axis=1)
    if errors.max() > EXACT:
        raise ValueError(
            f"its memory is no polynomial of the batch shape (relative error {errors.max():.2e})"
        )
    polynomials = np.maximum(coefficients, 0.0).T  # rounding makes some negative
    return Phases.of(traced.columns, _binding(polynomials, traced))


def _with_progress(probes: Sequence[Probe]) -> Iterable[Probe]:
    from tqdm.auto import tqdm

    return tqdm(probes, desc="tracing memory", unit=" shapes", delay=2, leave=False, disable=None)


def _binding(polynomials: FloatArray, traced: _Traced) -> FloatArray:
    """Returns the polynomials that are the largest one for at least one of 6,000 random shapes."""
    rng = np.random.default_rng(0)

    def drawn(most: int) -> np.ndarray:
        return np.exp(rng.uniform(0, np.log(most), NUM_DRAWN)).astype(int)

    samples = np.ones(NUM_DRAWN, int) if traced.packed else drawn(MAX_SAMPLES)
    stride = stride_of(traced.convolutions)
    tokens = drawn(MAX_TOKENS) * stride
    target_tokens = drawn(MAX_TOKENS) if traced.two_streams else np.zeros(NUM_DRAWN, int)
    shapes = monomials(samples, tokens, target_tokens)[:, traced.columns]
    # Most allocations return to an earlier size. Rounded are the bytes of a position, not of a sample of a waveform.
    of_position = monomials(np.ones(1), np.full(1, stride), np.ones(1))[:, traced.columns]
    distinct = np.unique((polynomials * of_position).round(1), axis=0) / of_position
    largest = [(part @ distinct.T).argmax(axis=1) for part in np.array_split(shapes, 12)]
    return distinct[np.unique(np.concatenate(largest))]
