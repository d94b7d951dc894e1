"""The attack in small: see attack.py. Hundreds more: ``python -m tests.online.attack 0 500``."""

from __future__ import annotations

import pytest

from tests.online.attack import run


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seeds", [range(start, start + 16) for start in range(0, 48, 16)], ids=str)
def test_whatever_the_settings_every_sample_comes_once(seeds: range) -> None:
    """Stopped and saved anywhere, twice, and resumed on other ranks. A failure names the seed that repeats it."""
    for seed in seeds:
        try:
            run(seed)
        except Exception as error:
            raise AssertionError(f"attack {seed} (python -m tests.online.attack {seed}): {error}") from error
