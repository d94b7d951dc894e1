"""Settings that all test modules about memory running out share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def collecting_garbage_is_quick() -> Iterator[None]:
    """Recovery collects garbage. What was imported is none of it, and walking over it would take a second each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
