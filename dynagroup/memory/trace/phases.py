"""A model's memory as a function of the batch shape, written down exactly instead of sampled.

What is alive after each allocation is a polynomial in (n, L): the same program runs whatever the shape, and every tensor's
size is a product of its dimensions. A few traces determine the polynomial at every allocation; the peak of any shape is
their maximum. Layers are alike, so a trace of three layers says what any number of layers would do: an added layer
raises everything between its own forward and the end of its backward by what it keeps. Where they are not, all are traced.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from dynagroup.memory.run import MONOMIALS, Phases, Run, max_affine, monomials
from dynagroup.memory.trace.build import ALIKE_LAYERS as TRACED_LAYERS
from dynagroup.memory.trace.build import as_meta_model, stacks
from dynagroup.memory.trace.program import MakeInputs, as_gathered, prepare, trace
from dynagroup.memory.trace.tracer import BLOCK, LiveBytes

__all__ = ["fit_phases", "peaks", "trace_phases"]

Probe: TypeAlias = "tuple[int, int, int]"
ALIKE = 5e-3  # how much the peak of a deepened trace may differ from that of the whole model
_ONE_STREAM = 6
_PACKED = [MONOMIALS.index(name) for name in ("1", "L", "L2")]  # one row, as long as all samples together
PROBES = [(2, 64, 96), (3, 64, 32), (2, 256, 160), (5, 192, 96), (4, 320, 64), (3, 512, 256), (7, 96, 352), (2, 160, 512),
          (6, 64, 256), (3, 128, 320), (4, 384, 480), (5, 480, 128), (2, 32, 32), (8, 224, 288)]  # fmt: skip
PACKED_PROBES: list[Probe] = [(1, 64, 0), (1, 512, 0), (1, 192, 0), (1, 320, 0)]
PROBED = 512  # the longest of them
FEWEST_POSITIONS = 64
MOST_TOKENS = 131072  # of a sample, or of a packed batch: phases that count only beyond are left out


def trace_phases(
    model_or_config: Any, workload: Run, *, inputs: MakeInputs | None = None, aligned: bool = True
) -> Phases:
    """Memory of any batch of this model: polynomials in the batch shape, from about eight traces of a few layers.

    Memory is the largest of the phases. Where attention slides, the program and its cache are others for lengths beyond the
    window: then there are two sets of them. Where the program itself depends on the shape, as one does that loops over
    tokens, phases are fitted to a few simulations, and a warning says so.

    Args:
        model_or_config: a model, a transformers config, or its name.
        workload: what is done with it. inputs: as in :func:`simulate`.
        aligned: whether to trace again for lengths whose masks need no padding.

    Raises:
        ValueError: the program depends on more than the shape, or the model has too few positions to tell.
    """
    with torch.inference_mode(False), torch.enable_grad():  # whatever the caller is in the midst of
        try:
            padded = _phases(model_or_config, workload, inputs, aligned=False)
        except ValueError as error:  # no polynomials at all
            return _simulated(model_or_config, workload, inputs, error)
        if workload.attention != "sdpa" or workload.layout == "packed" or not aligned:
            return padded
        spared = _phases(model_or_config, workload, inputs, aligned=True)
    return padded if spared == padded else replace(padded, aligned=spared)


def _phases(model_or_config: Any, workload: Run, inputs: MakeInputs | None, aligned: bool) -> Phases:
    two_streams = bool(workload.encoder_decoder) and workload.mode != "generate"
    run = partial(_traced, model_or_config, workload, inputs=inputs, two_streams=two_streams, aligned=aligned)
    config = getattr(as_meta_model(model_or_config, workload), "config", None)
    if workload.layout == "packed":
        return Phases(_rows(run(PACKED_PROBES)))
    window = _sliding_window(config)
    if window is None:
        return Phases(_rows(run(_probes(config, two_streams))))
    until = window - ((workload.max_new_tokens or 1) if workload.mode == "generate" else 1)
    beyond = [(n, length + -(-window // 16) * 16, target) for n, length, target in _probes(config, two_streams)]
    after = _rows(run(beyond))
    if until < FEWEST_POSITIONS:
        return Phases(after)
    return Phases(_rows(run(_probes(config, two_streams, until))), until, after)


# Where a program loops over tokens or over chunks of them, its allocations cannot be told apart by their place. Then whole
# peaks are fitted: at each short length two numbers of samples give every allocation as a line in n (the program is the
# same), hence the peak of any n; at the long ones there is one peak. Lengths are one beyond multiples of usual chunks, where
# rounding up costs most. The closest phases are raised by one factor until none of these peaks lies above them.
SHORT, LONG, LONG_SAMPLES = (1, 17, 65), (257, 1025, 4097), 2
LOOPS = 4  # a program so many times as long as that of one token loops over tokens: a minute for a thousand of them
SAMPLES = (1, 2, 4, 16, 64, 256)
FITS = 0.25  # how far off the closest phases may be at most before they are raised


def _simulated(model_or_config: Any, workload: Run, inputs: MakeInputs | None, error: ValueError) -> Phases:
    if (workload.encoder_decoder and workload.mode != "generate") or workload.layout == "packed":
        raise error
    whole = as_gathered(prepare(as_meta_model(model_or_config, workload), workload, False), workload)
    positions = _positions(getattr(whole, "config", None)) or LONG[-1]
    run = _shallow(model_or_config, whole, workload, inputs)
    rows = [row for length in SHORT if length <= positions for row in _peaks_of(run, length)]
    one_token = run((1, 1, 0))
    for length in LONG:
        if length <= positions:
            line = run((LONG_SAMPLES, length, 0))
            rows.append((LONG_SAMPLES, length, float(line.max())))
            if len(line) > LOOPS * len(one_token):
                break
    n, length, size = np.array(rows).T
    columns = [MONOMIALS.index(name) for name in ("1", "n", "nL", "nL2")]
    known = monomials(n, length, np.zeros_like(n))[:, columns]
    found, off = max_affine(known, size)
    if off > FITS:
        raise error
    warnings.warn(
        f"the memory of this model is fitted to simulations of up to {int(length.max())} tokens, because {error}; beyond that "
        "it is a guess",
        stacklevel=5,
    )
    phases = np.zeros((len(found), len(MONOMIALS)))
    phases[:, columns] = found * (size / (known @ found.T).max(axis=1)).max()
    return Phases(_rows(phases))


def _shallow(model_or_config: Any, whole: torch.nn.Module, workload: Run, inputs: MakeInputs | None) -> Any:
    """Bytes alive after each allocation of a shape, from three layers where these say what the whole model does."""
    depth = {index: len(stack) for index, stack in enumerate(stacks(whole))}

    def all_layers(probe: Probe) -> np.ndarray:
        return np.array(_run(whole, workload, probe, inputs, False, False).timeline, dtype=np.float64)

    if max(depth.values(), default=0) <= TRACED_LAYERS + 1:
        return all_layers
    shallow = _cut(model_or_config, workload, aligned=False)

    def three_layers(probe: Probe) -> np.ndarray:
        deepen = Deepen(shallow, depth, workload)
        return deepen.raised(_run(shallow, workload, probe, inputs, False, False, watch=deepen))

    probe = (2, 17, 0)
    try:
        alike = abs(three_layers(probe).max() / all_layers(probe).max() - 1) < ALIKE
    except (ValueError, KeyError):
        alike = False
    return three_layers if alike else all_layers


def _peaks_of(run: Any, length: int) -> list[tuple[int, int, float]]:
    """(samples, length, peak) of any number of samples: each allocation is a line through those of one and of two."""
    one, two = run((1, length, 0)), run((2, length, 0))
    if len(one) != len(two):
        return [(1, length, float(one.max())), (2, length, float(two.max()))]
    return [(n, length, float((one + (n - 1) * (two - one)).max())) for n in SAMPLES]


def _rows(phases: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(map(float, row)) for row in phases)


def _traced(
    model_or_config: Any,
    workload: Run,
    probes: Sequence[Probe],
    inputs: MakeInputs | None,
    two_streams: bool,
    aligned: bool,
) -> np.ndarray:
    whole = as_gathered(prepare(as_meta_model(model_or_config, workload), workload, aligned), workload)
    depth = {index: len(stack) for index, stack in enumerate(stacks(whole))}
    if max(depth.values(), default=0) > TRACED_LAYERS + 1:
        shallow = _cut(model_or_config, workload, aligned)
        n, length, target = probes[-1]
        try:
            phases = fit_phases(
                shallow,
                workload,
                probes,
                two_streams,
                layers=depth,
                inputs=inputs,
                aligned=aligned,
            )
            stated = float(peaks(phases, *(np.array([v]) for v in (n, length, target * two_streams)))[0])
            if abs(stated / _run(whole, workload, probes[-1], inputs, two_streams, aligned).peak - 1) < ALIKE:
                return phases
        except DependsOnShape:
            raise  # so does the whole model's
        except (ValueError, KeyError):
            pass  # the layers are not alike
    return fit_phases(whole, workload, probes, two_streams, inputs=inputs, aligned=aligned)


def _cut(model_or_config: Any, workload: Run, aligned: bool) -> torch.nn.Module:
    """The prepared model with three layers in each stack."""
    shallow = as_meta_model(model_or_config, workload)
    for stack in stacks(shallow):
        del stack[TRACED_LAYERS:]
    return as_gathered(prepare(shallow, workload, aligned), workload)


def _run(
    model: torch.nn.Module,
    workload: Run,
    probe: Probe,
    inputs: MakeInputs | None,
    two_streams: bool,
    aligned: bool,
    watch: Any = None,
) -> LiveBytes:
    n, length, target = probe
    longest = {"tokens": length, "target": target} if two_streams else {"tokens": length}
    return trace(model, workload, n, longest, inputs=inputs, block=1, slack=BLOCK // 2, watch=watch, aligned=aligned)


def _probes(config: Any, two_streams: bool, within: int = PROBED) -> list[Probe]:
    """Shapes that tell the monomials apart, within the model's positions. Multiples of 16: kernels pad masks to that."""
    columns = len(MONOMIALS) if two_streams else _ONE_STREAM
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    most = min(_positions(config) or PROBED, PROBED, within)
    most_target = min(getattr(text, "max_target_positions", None) or most, most)
    scaled = [
        (n, max(16, most * length // PROBED // 16 * 16), max(16, most_target * target // PROBED // 16 * 16))
        for n, length, target in PROBES
    ]
    for count in range(columns + 1, len(scaled) + 1):
        known = monomials(*np.array(scaled[:count]).T)[:, :columns]
        if np.linalg.matrix_rank(known / known.max(0)) == columns:
            return scaled[:count]
    raise ValueError(f"{min(most, most_target)} positions are too few to tell how memory grows with the length")


def _positions(config: Any) -> int | None:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "max_position_embeddings", None)


def _sliding_window(config: Any) -> int | None:
    """Positions that the cache of a sliding layer keeps, or None where no layer slides."""
    from transformers import DynamicCache

    if not hasattr(config, "get_text_config"):
        return None
    cache: Any = DynamicCache(config=config.get_text_config(decoder=True))
    windows = {layer.sliding_window for layer in cache.layers if getattr(layer, "sliding_window", None)}
    return max(windows) if windows else None


def peaks(phases: np.ndarray, n: np.ndarray, length: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Batch bytes of each shape: the largest phase. float64 (K,)."""
    return (monomials(n, length, target) @ phases.T).max(axis=1)


class DependsOnShape(ValueError):
    """A model whose program differs from shape to shape: its memory is no polynomial."""


class Deepen:
    """Watches the last of three layers in each stack, and raises the timeline as if there were ``layers`` of them."""

    def __init__(self, model: torch.nn.Module, layers: Mapping[int, int], workload: Run) -> None:
        self._stacks = stacks(model)
        self._layers = layers
        # With checkpointing nothing but autocast's cache holds the cast weights, and that ends with the forward pass.
        self._drops_casts = bool(workload.autocast and workload.gradient_checkpointing)
        self.spans: list[dict[str, int]] = [{} for _ in self._stacks]

    @contextmanager
    def __call__(self, tracer: LiveBytes) -> Iterator[None]:
        handles = []
        for stack, span in zip(self._stacks, self.spans, strict=True):
            for place in (1, 2):
                hook = self._hook(tracer, span, place)
                handles.append(stack[place].register_forward_pre_hook(hook, with_kwargs=True))
        yield
        for handle in handles:
            handle.remove()

    @staticmethod
    def _hook(tracer: LiveBytes, span: dict[str, int], place: int) -> Any:
        def before(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            if f"live{place}" in span:
                return
            span[f"live{place}"] = tracer.live
            span[f"start{place}"] = len(tracer.timeline)
            hidden = args[0] if args else kwargs.get("hidden_states")
            if place == 2 and hidden is not None and hidden.requires_grad:
                hidden.register_hook(lambda grad: span.update(end=len(tracer.timeline)))

        return before

    def raised(self, tracer: LiveBytes) -> np.ndarray:
        """The timeline of the deep model."""
        line = np.array(tracer.timeline, dtype=np.float64)
        prefilled, at_prompt = tracer.marks.get("prefilled", (len(line), 0))
        _, at_full = tracer.marks.get("stretched", (len(line), 0))
        for index, span in enumerate(self.spans):
            kept = span["live2"] - span["live1"]
            added = self._layers[index] - TRACED_LAYERS
            line[span["start2"] : min(span.get("end", len(line)), prefilled)] += kept * added
            if self._drops_casts:
                line[tracer.marks["forward_ends"][0] : span.get("end", len(line))] -= (
                    _cast_bytes(self._stacks[index][1]) * added
                )
            if kept:  # the stack that has the cache, which grows from the prompt's length to its last
                line[prefilled:] += (kept + (at_full - at_prompt) / TRACED_LAYERS) * added
        return line


def _cast_bytes(layer: torch.nn.Module) -> int:
    linear = (m for m in layer.modules() if getattr(getattr(m, "weight", None), "ndim", 0) == 2)
    return sum(
        2 * p.numel()
        for m in linear
        for p in m.parameters(recurse=False)
        if p.dtype == torch.float32 and p.requires_grad
    )


def fit_phases(
    model: torch.nn.Module,
    workload: Run,
    probes: Sequence[Probe],
    two_streams: bool,
    *,
    layers: Mapping[int, int] | None = None,
    inputs: MakeInputs | None = None,
    aligned: bool = False,
) -> np.ndarray:
    """Phases (P, 12) in bytes per monomial, static memory left out.

    Args:
        model: prepared, on the meta device. probes: shapes to trace, one more than there are monomials.
        layers: how many layers each stack really has, where the model has three.

    Raises:
        ValueError: the program differs between shapes, or a size is no polynomial in them.
    """
    packed = workload.layout == "packed"
    columns = _PACKED if packed else list(range(len(MONOMIALS) if two_streams else _ONE_STREAM))
    lines: list[np.ndarray] = []
    for probe in probes:
        deepen = Deepen(model, layers, workload) if layers else None
        tracer = _run(model, workload, probe, inputs, two_streams, aligned, watch=deepen)
        lines.append(deepen.raised(tracer) if deepen else np.array(tracer.timeline, dtype=np.float64))
        if len(lines[0]) != len(lines[-1]):  # said at once: such a program may loop over the tokens, for minutes
            raise DependsOnShape(
                f"the program depends on the shape: {len(lines[0])} and {len(lines[-1])} allocations for {probes[0]} and {probe}"
            )
    known = monomials(*np.array(probes).T)[:, columns]
    observed = np.array(lines)
    coefficients = np.linalg.lstsq(known / known.max(0), observed, rcond=None)[0] / known.max(0)[:, None]
    error = np.abs(known @ coefficients - observed).max() / observed.max()
    if error > 1e-4:
        raise ValueError(f"sizes are no polynomial of the shape: relative error {error:.2e}")
    phases = np.zeros((coefficients.shape[1], len(MONOMIALS)))
    phases[:, columns] = np.maximum(coefficients, 0.0).T  # below zero is rounding: nothing alive has a negative size
    return _binding(phases, two_streams, packed)


def _binding(phases: np.ndarray, two_streams: bool, packed: bool) -> np.ndarray:
    """The phases that are the largest for some shape."""
    rng = np.random.default_rng(0)

    def drawn(least: int, most: int) -> np.ndarray:
        return np.exp(rng.uniform(np.log(least), np.log(most), 6000)).astype(int)

    n = np.ones(6000, int) if packed else drawn(1, 16384)
    length = drawn(16, MOST_TOKENS)
    target = drawn(16, MOST_TOKENS) if two_streams else np.zeros(6000, int)
    # distinct rows only: most allocations repeat an earlier state
    phases = np.unique(phases.round(1), axis=0)
    winners: set[int] = set()
    for part in np.array_split(np.arange(6000), 12):
        winners |= set((monomials(n[part], length[part], target[part]) @ phases.T).argmax(axis=1).tolist())
    return phases[sorted(winners)]
