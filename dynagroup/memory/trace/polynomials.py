"""Finds how a model's memory depends on the batch shape, exactly, from a few traces of the model.

A trace runs the model without data and records the bytes alive after each allocation. Each of these values is a polynomial in (n
samples, L tokens), so a few traces determine it (least squares, error 0). The peak of a batch is the largest of the polynomials,
called phases. If all layers have one class, only the first are traced, up to two of those at the end that have parameters of
equal shapes: every further layer adds the same bytes, from its forward pass to the end of its backward pass."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
import torch

from dynagroup.memory.phases import (
    MASK_ALIGNMENT,
    MONOMIALS,
    FloatArray,
    MakeInputs,
    Phases,
    Run,
    max_affine,
    monomials,
)
from dynagroup.memory.trace.kernels import LiveBytes
from dynagroup.memory.trace.model import ALIKE_LAYERS, as_meta_model, stacks
from dynagroup.memory.trace.program import as_gathered, prepare, trace
from dynagroup.validation import warn_user

Probe: TypeAlias = "tuple[int, int, int]"  # shape to trace: samples, tokens, target tokens
Timeline: TypeAlias = (
    "Callable[[Probe], FloatArray]"  # returns the bytes alive after each allocation
)
ALIKE = 5e-3  # largest relative error of a peak that is computed from a few layers
EXACT = 1e-4  # largest error of a polynomial, relative to the largest value of its trace
# CUDA kernels pad rows to multiples of 32 and masks to multiples of 16. Traced lengths are multiples of 32 plus 1, so
# all get the most padding. A program that pads to 64 or 512 gives no polynomial at these lengths, and so is noticed.
ALIGNMENT = 32
PROBES = [
    (2, 65, 97),
    (3, 33, 33),
    (2, 257, 161),
    (5, 193, 97),
    (4, 321, 65),
    (3, 481, 257),
    (7, 97, 353),
    (2, 161, 481),
    (6, 65, 257),
    (3, 129, 321),
    (6, 385, 449),
    (5, 449, 129),
    (2, 33, 33),
    (8, 225, 289),
]
PACKED_PROBES: list[Probe] = [(1, 65, 0), (1, 513, 0), (1, 193, 0), (1, 1025, 0)]
PROBED = 512  # about the longest length in PROBES, in tokens
LONGEST = (
    4097  # tokens of the last traced shape, if the model has so many positions: checks long samples
)
FEWEST_POSITIONS = 3 * ALIGNMENT + 1  # three traced lengths determine a polynomial of degree 2
MOST_TOKENS = 131072  # in a sample or packed batch; polynomials that are the largest only above this are dropped


def trace_phases(
    model_or_config: Any, workload: Run, *, inputs: MakeInputs | None = None
) -> Phases:
    """Returns how a model's memory depends on the batch shape: polynomials from about eight traces of a few layers.

    Sliding-window attention gives two sets: for samples within the window, and for longer ones. If the model's
    operations depend on the shape, polynomials are fitted to simulated batches, with a warning. ValueError: nothing fits."""
    padded = _Traced(model_or_config, workload, inputs)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.compiler.set_stance("force_eager"),
    ):  # whatever the caller set
        try:
            found = _phases(padded)
        except ValueError as error:
            return _simulated(padded, error)
        if workload.attention != "sdpa" or padded.packed:
            return found
        spared = _phases(replace(padded, beyond=0))
    return found if spared == found else replace(found, aligned=spared)


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
        names = (
            ("1", "L", "L2") if self.packed else MONOMIALS if self.two_streams else MONOMIALS[:6]
        )
        return [MONOMIALS.index(name) for name in names]

    @cached_property
    def config(self) -> Any:
        config: Any = getattr(as_meta_model(self.source, self.workload), "config", None)
        return (
            config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        )

    def model(self, depths: Sequence[int] = ()) -> torch.nn.Module:
        """Returns the model, ready to trace, with all layers, or at most ``depths`` layers in each stack."""
        model = as_meta_model(self.source, self.workload)
        for stack, depth in zip(stacks(model), depths, strict=False):
            del stack[depth:]
        return as_gathered(prepare(model, self.workload), self.workload)

    def run(self, model: torch.nn.Module, probe: Probe, watch: Any = None) -> LiveBytes:
        n, length, target = probe
        longest = {"tokens": length, "target": target} if self.two_streams else {"tokens": length}
        return trace(model, self.workload, n, longest, inputs=self.inputs, watch=watch, smooth=True)

    def timeline(self, check: Probe) -> Timeline:
        """Returns a function from shapes to timelines; it traces a few layers if their peak is right for ``check``."""
        whole = self.model()
        windows = (
            _windows(self.config) if self.workload.mode == "generate" else []
        )  # what a layer's cache keeps
        layers, depths = (
            [*map(len, stacks(whole))],
            [_depth(stack, windows) for stack in stacks(whole)],
        )
        all_layers: Timeline = lambda probe: np.array(  # noqa: E731
            self.run(whole, probe).timeline, dtype=np.float64
        )

        def few_layers(probe: Probe) -> FloatArray:
            deepen = _Deepen(shallow, layers, self.workload)
            return deepen.raised(self.run(shallow, probe, watch=deepen))

        if any(depth + 1 < count for depth, count in zip(depths, layers, strict=True)):
            shallow = self.model(depths)
            with suppress(ValueError, KeyError):  # layers are not equal, so all of them are traced
                if abs(few_layers(check).max() / all_layers(check).max() - 1) < ALIKE:
                    return few_layers
        return all_layers


def _depth(stack: torch.nn.ModuleList, windows: Sequence[int | None]) -> int:
    """Returns how many layers to trace: all up to two of those at the end with equal shapes, settings and trained parameters."""
    known: Any = windows if len(windows) == len(stack) else [None] * len(stack)
    kinds = [
        [
            getattr(layer, "gradient_checkpointing", None),
            *((p.shape, p.dtype, p.requires_grad) for p in layer.parameters()),
            size,
            *(
                value
                for part in layer.modules()
                for name, value in vars(part).items()
                if name == "p" or "drop" in name
            ),
        ]
        for size, layer in zip(known, stack, strict=True)
    ]
    others = [place for place, kind in enumerate(kinds) if kind != kinds[-1]]
    return max([ALIKE_LAYERS, *(place + 3 for place in others[-1:])])


class _Deepen:
    """Computes the timeline of a model with so many ``layers`` from a trace of a few, by watching the last two."""

    def __init__(self, model: torch.nn.Module, layers: Sequence[int], workload: Run) -> None:
        self._stacks, self._layers = stacks(model), layers
        # With gradient checkpointing, weights that autocast casts live in its cache until the forward pass ends.
        self._drops_casts = bool(workload.autocast and workload.gradient_checkpointing)
        self._spans: list[dict[str, int]] = [{} for _ in self._stacks]

    @contextmanager
    def __call__(self, tracer: LiveBytes) -> Iterator[None]:
        handles = []
        for stack, span in zip(self._stacks, self._spans, strict=True):
            for place in (1, 2):
                note = partial(self._note, tracer, span, place)
                handles.append(stack[place - 3].register_forward_pre_hook(note, with_kwargs=True))
        yield
        for handle in handles:
            handle.remove()

    @staticmethod
    def _note(
        tracer: LiveBytes, span: dict[str, int], place: int, _: Any, args: tuple, kwargs: dict
    ) -> None:
        if f"live{place}" in span:
            return
        span[f"live{place}"], span[f"start{place}"] = tracer.live, len(tracer.timeline)
        hidden = args[0] if args else kwargs.get("hidden_states")
        if place == 2 and hidden is not None and hidden.requires_grad:
            hidden.register_hook(lambda grad: span.update(end=len(tracer.timeline)))

    def raised(self, tracer: LiveBytes) -> FloatArray:
        """Returns the timeline of the model with all its layers, by adding what each further layer keeps."""
        line = np.array(tracer.timeline, dtype=np.float64)
        prefilled, at_prompt = tracer.marks.get("prefilled", (len(line), 0))
        _, at_full = tracer.marks.get("stretched", (len(line), 0))
        for stack, layers, span in zip(self._stacks, self._layers, self._spans, strict=True):
            kept, added = span["live2"] - span["live1"], layers - len(stack)
            end = span.get("end", len(line))
            line[span["start2"] : min(end, prefilled)] += kept * added
            if self._drops_casts:
                line[tracer.marks["forward_ends"][0] : end] -= _cast_bytes(stack[-2]) * added
            if kept:  # the stack with the key-value cache, which grows from the prompt's length to the final length
                line[prefilled:] += (kept + (at_full - at_prompt) / len(stack)) * added
        return line


def _cast_bytes(layer: torch.nn.Module) -> int:
    matrices = [m for m in layer.modules() if getattr(getattr(m, "weight", None), "ndim", 0) == 2]
    cast = [
        p
        for m in matrices
        for p in m.parameters(recurse=False)
        if p.dtype == torch.float32 and p.requires_grad
    ]
    return sum(2 * p.numel() for p in cast)


def _phases(traced: _Traced) -> Phases:
    if traced.packed:
        return _exact(traced, PACKED_PROBES)
    workload, window = (
        traced.workload,
        max((size for size in _windows(traced.config) if size), default=None),
    )
    if window is None:
        return _exact(traced, _probes(traced))
    until = window - ((workload.max_new_tokens or 1) if workload.mode == "generate" else 1)
    wide = -(-window // ALIGNMENT) * ALIGNMENT
    after = _exact(traced, [(n, length + wide, target) for n, length, target in _probes(traced)])
    return (
        after
        if until < FEWEST_POSITIONS
        else replace(_exact(traced, _probes(traced, until)), until=until, after=after.rows)
    )


def _probes(traced: _Traced, within: int = LONGEST) -> list[Probe]:
    """Returns shapes to trace, enough to find all coefficients, within the model's positions; the last is the longest."""
    most = min(getattr(traced.config, "max_position_embeddings", None) or LONGEST, within)
    most_target = min(getattr(traced.config, "max_target_positions", None) or most, most)

    def scaled_to(
        most: int, length: int
    ) -> int:  # shortens lengths in proportion to the model's positions
        return _aligned(length if most >= PROBED else most * length // PROBED, traced)

    scaled = [
        (n, scaled_to(most, length), scaled_to(most_target, target)) for n, length, target in PROBES
    ]
    columns = traced.columns
    for count in range(len(columns) + 1, len(scaled) + 1):
        n, length, target = scaled[count - 1]
        probes = [*scaled[: count - 1], (n, max(length, _aligned(most, traced)), target)]
        known = monomials(*np.array(probes).T)[:, columns]
        if np.linalg.matrix_rank(known / known.max(0)) == len(columns):
            return probes
    raise ValueError(
        f"the model's {min(most, most_target)} positions are too few to find how memory grows with length"
    )


def _aligned(length: int, traced: _Traced) -> int:
    """Returns the largest length up to ``length`` that is ``traced.beyond`` more than a multiple of 32."""
    return max((length - traced.beyond) // ALIGNMENT, 1) * ALIGNMENT + traced.beyond


def _windows(config: Any) -> list[int | None]:
    """Returns for each layer how many positions its cache keeps; None: all, as the layer has no sliding window."""
    from transformers import DynamicCache, PretrainedConfig

    layers: Any = DynamicCache(config=config).layers if isinstance(config, PretrainedConfig) else ()
    return [getattr(layer, "sliding_window", None) for layer in layers]


def _exact(traced: _Traced, probes: Sequence[Probe]) -> Phases:
    """Traces these shapes; returns their exact polynomials. ValueError: memory is no polynomial of the shape."""
    timeline, lines = traced.timeline(probes[-1]), []
    for probe in _shown(probes):
        lines.append(timeline(probe))
        if len(lines[0]) != len(lines[-1]):  # fails early: tracing a loop over tokens takes minutes
            raise ValueError(
                f"its operations depend on the shape (allocations for {probe} and {probes[0]} differ)"
            )
    known, observed = monomials(*np.array(probes).T)[:, traced.columns], np.array(lines)
    coefficients = (
        np.linalg.lstsq(known / known.max(0), observed, rcond=None)[0] / known.max(0)[:, None]
    )
    error = (np.abs(known @ coefficients - observed).max(axis=1) / observed.max(axis=1)).max()
    if error > EXACT:
        raise ValueError(
            f"its memory is no polynomial of the batch shape (relative error {error:.2e})"
        )
    return Phases.of(
        traced.columns, _binding(np.maximum(coefficients, 0.0).T, traced)
    )  # rounding makes some negative


def _shown(shapes: Sequence[Any]) -> Iterable[Any]:
    from tqdm.auto import tqdm

    return tqdm(shapes, desc="tracing memory", unit=" shapes", delay=2, leave=False, disable=None)


def _binding(phases: FloatArray, traced: _Traced) -> FloatArray:
    """Returns the polynomials that are the largest one for at least one of 6,000 random shapes."""
    rng = np.random.default_rng(0)

    def drawn(least: int, most: int) -> np.ndarray:
        return np.exp(rng.uniform(np.log(least), np.log(most), 6000)).astype(int)

    n, length = np.ones(6000, int) if traced.packed else drawn(1, 16384), drawn(1, MOST_TOKENS)
    target = drawn(1, MOST_TOKENS) if traced.two_streams else np.zeros(6000, int)
    phases = np.unique(phases.round(1), axis=0)  # most allocations return to an earlier size
    shapes = monomials(n, length, target)[:, traced.columns]
    return phases[
        np.unique(
            np.concatenate(
                [(part @ phases.T).argmax(axis=1) for part in np.array_split(shapes, 12)]
            )
        )
    ]


# A model that loops over tokens has no exact polynomials. They are fitted to its peaks instead: at each length, traces
# of one and of two samples give every allocation as a line in n. Lengths are 1 above multiples of usual chunk sizes, so
# they get the most padding. Then all fitted polynomials are multiplied, so that no peak is above the prediction.
LENGTHS, SAMPLES = (1, 17, 33, 65, 129, 257, 513, 1025, 2049, 4097), (1, 2, 4, 16, 64, 256)
LOOPS, SHORT = (
    4,
    513,
)  # LOOPS times the allocations of one token mean a loop, which is traced up to 2 x SHORT tokens
FITS = 0.5  # largest relative error of the fitted polynomials, before the factor
FITTED = [MONOMIALS.index(name) for name in ("1", "n", "nL", "nL2")]


def _simulated(traced: _Traced, error: ValueError) -> Phases:
    if traced.two_streams or traced.packed:
        raise error
    most = min(getattr(traced.config, "max_position_embeddings", None) or LENGTHS[-1], LENGTHS[-1])
    timeline, rows = traced.timeline((2, 17, 0)), []
    one_token = len(timeline((1, 1, 0)))
    for length in _shown(
        sorted(
            {
                min(length, most)
                for length in (*LENGTHS, (most - 1) // MASK_ALIGNMENT * MASK_ALIGNMENT + 1)
            }
        )
    ):
        one, two = timeline((1, length, 0)), timeline((2, length, 0))
        peaks = (
            [one + (n - 1) * (two - one) for n in SAMPLES] if len(one) == len(two) else [one, two]
        )
        rows += [(n, length, float(line.max())) for n, line in zip(SAMPLES, peaks, strict=False)]
        if length > SHORT and len(one) > LOOPS * one_token:
            break
    n, lengths, size = np.array(rows).T
    known = monomials(n, lengths, np.zeros_like(n))[:, FITTED]
    found, off = max_affine(known, size)
    if off > FITS:
        raise error
    longest, way_out = (
        int(lengths.max()),
        "for longer samples the prediction may be wrong, so measure() them",
    )
    warn_user(
        f"the memory of this model was fitted to simulations up to {longest} tokens, because {error}; {way_out}"
    )
    return Phases.of(FITTED, found * (size / (known @ found.T).max(axis=1)).max())
