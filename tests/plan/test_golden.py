"""Plans of real lengths take no more predicted time than those of commit bbc3155: a sample of the golden table."""

from __future__ import annotations

import json

import numpy as np

from tests.plan.golden import CASES, GOLDEN, differences


def test_plans_take_about_the_time_that_they_took() -> None:
    more = differences(CASES[::11], json.loads(GOLDEN.read_text()))
    assert np.mean(list(more.values())) <= 0.006
    assert max(more.values()) <= 0.03, max(more, key=lambda key: more[key])
