"""Recovery collects garbage at every failure: of what a module's tests make, not of all that other tests have imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def little_to_collect() -> Iterator[None]:
    """For every test of a module that imports it."""
    gc.freeze()
    yield
    gc.unfreeze()
