"""What tests of memory share: the bytes of one batch, and phases by the names of their monomials."""

from typing import Any

from dynagroup.memory.phases import MONOMIALS
from dynagroup.shapes import BatchShape


def bytes_of(memory: Any, num_samples: int, longest: Any) -> float:
    """Predicted bytes of one batch."""
    [size] = memory.batch_bytes(BatchShape.of(num_samples, longest))
    return float(size)


def phase(coefficients: dict[str, float]) -> list[float]:
    """A row of phases: what each monomial, such as ``nL``, is multiplied by."""
    return [coefficients.get(name, 0.0) for name in MONOMIALS]
