"""A model's memory as a function of the batch shape, written down exactly instead of sampled.

What is alive after each allocation is a polynomial in (n, L): the same program runs whatever the shape, and every tensor's
size is a product of its dimensions. A few traces determine the polynomial at every allocation; the peak of any shape is
their maximum. Layers are alike, so a trace of three layers says what any number of layers would do: an added layer
raises everything between its own forward and the end of its backward by what it keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from dynagroup.memory.program import MakeInputs, trace
from dynagroup.memory.tracer import LiveBytes
from dynagroup.memory.workload import Workload

__all__ = ["MONOMIALS", "fit_phases", "peaks", "stacks"]

TRACED_LAYERS = 3
MONOMIALS = ("1", "n", "L", "nL", "L2", "nL2", "T", "nT", "T2", "nT2", "LT", "nLT")
_ONE_STREAM = 6
PROBES = [(2, 64, 96), (3, 64, 32), (2, 256, 160), (5, 192, 96), (4, 320, 64), (3, 512, 256), (7, 96, 352), (2, 160, 512),
          (6, 64, 256), (3, 128, 320), (4, 384, 480), (5, 480, 128), (2, 32, 32), (8, 224, 288)]  # fmt: skip


def design(n: np.ndarray, length: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The monomials of each shape: float64 (K, 12)."""
    n, ln, t = (np.asarray(v, dtype=np.float64) for v in (n, length, target))
    one = np.ones_like(n)
    return np.stack([one, n, ln, n * ln, ln**2, n * ln**2, t, n * t, t**2, n * t**2, ln * t, n * ln * t], axis=1)


def peaks(phases: np.ndarray, n: np.ndarray, length: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Batch bytes of each shape: the largest phase. float64 (K,)."""
    return (design(n, length, target) @ phases.T).max(axis=1)


def stacks(model: torch.nn.Module) -> list[torch.nn.ModuleList]:
    """The lists of like layers that a model is made of, outermost ones only."""
    found: list[torch.nn.ModuleList] = []
    for module in model.modules():
        nested = any(module is inner for outer in found for inner in outer.modules())
        alike = (
            isinstance(module, torch.nn.ModuleList)
            and len(module) >= TRACED_LAYERS
            and len({type(m) for m in module}) == 1
        )
        if alike and not nested:
            found.append(module)  # type: ignore[arg-type]
    return found


class Deepen:
    """Watches the last of three layers in each stack, and raises the timeline as if there were ``layers`` of them."""

    def __init__(self, model: torch.nn.Module, layers: Mapping[int, int], workload: Workload) -> None:
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
    workload: Workload,
    *,
    two_streams: bool,
    layers: Mapping[int, int] | None = None,
    inputs: MakeInputs | None = None,
) -> np.ndarray:
    """Phases (P, 12) in bytes: coefficients of :data:`MONOMIALS`, static memory left out.

    Raises:
        ValueError: the program differs between shapes, or a size is no polynomial in them.
    """
    columns = len(MONOMIALS) if two_streams else _ONE_STREAM
    probes = PROBES[: len(MONOMIALS) + 1] if two_streams else PROBES[: _ONE_STREAM + 1]
    lines = []
    for n, length, target in probes:
        deepen = Deepen(model, layers, workload) if layers else None
        longest = {"tokens": length, "target": target} if two_streams else {"tokens": length}
        tracer = trace(model, workload, n, longest, inputs=inputs, block=1, watch=deepen)
        lines.append(deepen.raised(tracer) if deepen else np.array(tracer.timeline, dtype=np.float64))
    if len({len(line) for line in lines}) > 1:
        raise ValueError(f"the program depends on the shape: {[len(line) for line in lines]} allocations")
    known = design(*np.array(probes).T)[:, :columns]
    observed = np.array(lines)
    coefficients = np.linalg.lstsq(known / known.max(0), observed, rcond=None)[0] / known.max(0)[:, None]
    error = np.abs(known @ coefficients - observed).max() / observed.max()
    if error > 1e-4:
        raise ValueError(f"sizes are no polynomial of the shape: relative error {error:.2e}")
    phases = np.zeros((coefficients.shape[1], len(MONOMIALS)))
    phases[:, :columns] = np.where(np.abs(coefficients) < 1e-3, 0.0, coefficients).T
    return _binding(phases, two_streams)


def _binding(phases: np.ndarray, two_streams: bool) -> np.ndarray:
    """The phases that are the largest for some shape."""
    rng = np.random.default_rng(0)
    n = np.exp(rng.uniform(0, np.log(16384), 6000)).astype(int)
    length = np.exp(rng.uniform(np.log(16), np.log(8192), 6000)).astype(int)
    target = np.exp(rng.uniform(np.log(16), np.log(8192), 6000)).astype(int) if two_streams else np.zeros(6000, int)
    # distinct rows only: most allocations repeat an earlier state
    phases = np.unique(phases.round(2), axis=0)
    winners: set[int] = set()
    for part in np.array_split(np.arange(6000), 12):
        winners |= set((design(n[part], length[part], target[part]) @ phases.T).argmax(axis=1).tolist())
    return phases[sorted(winners)]
