"""Which traced models a workload may be like, of which not everything is known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.memory.closed_form import columns
from dynagroup.memory.run import MONOMIALS
from dynagroup.memory.workload import Workload
from dynagroup.shapes import BatchShape

__all__ = ["LIKE", "Plausible", "member"]

# Fields that make memory another function of the batch. Those further behind give way first where too few models agree.
LIKE = ("mode", "gradient_checkpointing", "attention", "encoder_decoder", "causal", "lm_head", "score_bias", "autocast", "dtype",
        "dropout")  # fmt: skip
# Sizes: the nearest models count.
NEAR = ("max_new_tokens", "vocabulary_size", "hidden_size", "num_layers", "num_kv_heads", "intermediate_size")
FEWEST = 24


def member(workload: Workload, two_streams: bool, phases: Sequence[Sequence[float]]) -> dict[str, Any]:
    """One traced model, as the card of a regressor holds it: phases without their zeros."""
    known = {name: getattr(workload, name) for name in (*LIKE, *NEAR, "fixed_tokens")}
    rows = [{name: round(float(v), 1) for name, v in zip(MONOMIALS, row, strict=True) if v} for row in phases]
    return {"workload": known, "two_streams": two_streams, "phases": rows}


class Plausible:
    """What each of several traced models would need for a batch.

    Args:
        workload: those members count that agree with what is known of it. Lengths are taken to count everything that is
            read, unless its ``fixed_tokens`` say otherwise.
        members: from :func:`member`.
        two_streams: whether batches have a target with lengths of its own.
    """

    def __init__(self, workload: Workload, members: Sequence[Mapping[str, Any]], two_streams: bool) -> None:
        chosen = _like(workload, members, two_streams)
        rows = [[[row.get(name, 0.0) for name in MONOMIALS] for row in m["phases"]] for m in chosen]
        self._phases = np.array([row for phases in rows for row in phases])
        self._starts = np.cumsum([0, *(len(phases) for phases in rows[:-1])])

    def batch_bytes(self, shape: BatchShape) -> NDArray[np.float64]:
        """Bytes that grow with the batch, of each of K batches in each of M models: float64 (K, M)."""
        return np.maximum(np.maximum.reduceat(columns(shape) @ self._phases.T, self._starts, axis=1), 1.0)


def _like(workload: Workload, members: Sequence[Mapping[str, Any]], two_streams: bool) -> list[Mapping[str, Any]]:
    found = [m for m in members if m["two_streams"] == two_streams]
    apart = bool(workload.fixed_tokens)
    found = [m for m in found if bool(m["workload"]["fixed_tokens"]) == apart] or list(members)
    for name in LIKE:
        value = getattr(workload, name)
        agreeing = [m for m in found if m["workload"][name] == value]
        if value is not None and len(agreeing) >= (1 if name == "mode" else FEWEST):
            found = agreeing
    sizes = {name: getattr(workload, name) for name in NEAR if getattr(workload, name)}
    if sizes and len(found) > FEWEST:
        found = sorted(found, key=lambda m: _distance(sizes, m["workload"]))[: max(FEWEST, len(found) // 3)]
    return found


def _distance(sizes: Mapping[str, int], known: Mapping[str, Any]) -> float:
    return sum(abs(math.log(value / max(known[name] or 1, 1))) for name, value in sizes.items())
