"""Sums of measured updates, from which work is fitted."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Moments"]

SIZE = 4


class Moments:
    """Sums over updates of the products of (steps, n L, n L^2, seconds), each divided by the update's seconds.

    They are all that least squares of relative errors needs, and they add up over ranks: so nothing grows with the run.
    """

    def __init__(self, products: NDArray[np.float64] | None = None, num_updates: float = 0) -> None:
        self.products = np.zeros((SIZE, SIZE)) if products is None else products
        self.num_updates = num_updates

    def note(self, steps: int, tokens: float, squares: float, seconds: float) -> None:
        """One more update, which took so long."""
        row = np.array([steps, tokens, squares, seconds]) / seconds
        self.products = self.products + np.outer(row, row)
        self.num_updates += 1

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.products + other.products, self.num_updates + other.num_updates)

    def __sub__(self, other: Moments) -> Moments:
        return Moments(self.products - other.products, self.num_updates - other.num_updates)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Moments) and np.array_equal(self.products, other.products)

    __hash__ = None  # type: ignore[assignment] - it changes

    def to_list(self) -> list[float]:
        """Numbers that add up."""
        return [*self.products.ravel().tolist(), float(self.num_updates)]

    @classmethod
    def from_list(cls, values: list[float]) -> Moments:
        return cls(np.asarray(values[:-1]).reshape(SIZE, SIZE), values[-1])
