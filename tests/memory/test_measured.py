"""Rows measured on a device raise what was traced; they never replace it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup.budget.memory import MemoryBudget
from dynagroup.errors import ConfigError
from dynagroup.memory import Measurement, Measurements, MemoryRegressor, TracedMemory, Workload, what_fits
from dynagroup.memory.run import Phases
from dynagroup.memory.traced import line_above
from dynagroup.shapes import BatchShape
from tests import models

LLAMA = models.llama(vocab=400, width=64, layers=3)
# 5,000 bytes whatever the batch, or 100 a token and one a pair of tokens.
PHASES = Phases(((5000.0, *[0.0] * 11), (0.0, 0.0, 0.0, 100.0, 0.0, 1.0, *[0.0] * 6)))
TRACED = TracedMemory(1000, Workload(mode="train", phases=PHASES))
SHAPES = [(n, length) for n in (1, 3, 20) for length in (16, 100, 900)]


def rows_of(memory, factor=1.0, constant=0.0, workload=None):
    sizes = memory.batch_bytes(BatchShape.of(*np.array(SHAPES).T)) * factor + constant
    rows = [Measurement(n, {"tokens": ln}, 1000, int(s)) for (n, ln), s in zip(SHAPES, sizes, strict=True)]
    return Measurements(tuple(rows), workload or memory.workload, "measured")


positive = st.floats(1, 1e12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=12))
def test_the_line_lies_above_every_row_and_never_below_the_trace(points):
    said, taken = np.array(points).T
    factor, constant = line_above(said, taken)
    assert factor >= 1
    assert constant >= 0
    assert (factor * said + constant >= taken * (1 - 1e-9)).all()
    excess = np.mean((factor * said + constant) / taken)
    for other in (1.0, 1.1, 2.0, float(np.max(taken / said))):  # no other line above them exceeds them less
        gap = max(float(np.max(taken - max(other, 1.0) * said)), 0.0)
        assert excess <= np.mean((max(other, 1.0) * said + gap) / taken) * (1 + 1e-9)


def test_a_device_that_takes_half_as_much_again_and_workspaces():
    better = TRACED.corrected(rows_of(TRACED, 1.5, 2000.0))
    assert better.factor == pytest.approx(1.5, abs=1e-3)
    assert better.constant_bytes == pytest.approx(2000, abs=2)
    unseen = BatchShape.of([2, 50], [333, 5000])
    assert better.batch_bytes(unseen) == pytest.approx(1.5 * TRACED.batch_bytes(unseen) + 2000, rel=1e-3)
    assert better.fingerprint != TRACED.fingerprint
    again = better.relative(BatchShape.of([20, 1], [900, 16]), BatchShape.of(20, 900))
    assert again[0] == pytest.approx(1.0)
    assert again[1] == pytest.approx(7000 / better.batch_bytes(BatchShape.of(20, 900))[0] + 2500 / 27e6, rel=0.5)


def test_a_device_that_takes_less_changes_nothing():
    """What scattered downward (shorter outputs, say) does not make the next batch smaller."""
    assert TRACED.corrected(rows_of(TRACED, 0.5)) == TRACED


def test_static_memory_is_the_larger_of_both():
    small = Measurements((Measurement(1, {"tokens": 16}, 7777, 1),), TRACED.workload)
    assert TRACED.corrected(small).static_bytes == 7777


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "forward"}, "`measured` has mode='forward', but what is asked about has mode='train'"),
        ({"num_layers": 9}, "`measured` has num_layers=9, but what is asked about has num_layers=3"),
        ({"attention": "eager"}, "`measured` has attention='eager'"),
    ],
)
def test_rows_of_another_workload_are_refused(change, message):
    asked = TracedMemory(0, Workload(mode="train", num_layers=3, attention="sdpa", phases=PHASES))
    with pytest.raises(ConfigError, match=message):
        asked.corrected(rows_of(TRACED, workload=Workload(**{"mode": "train", **change})))


def test_rows_that_say_nothing_are_refused():
    none = Measurements((Measurement(1, {"tokens": 5}, 0, None, oom=True),), TRACED.workload)
    for rows in (none, [1, 2]):
        with pytest.raises(ConfigError, match="at least one row that did not run out of memory"):
            TRACED.corrected(rows)


def test_one_call_takes_them():
    """Measured at 1.4 times the trace, 1.4 times less fits, in `what_fits` and in the budget."""
    how = {"dtype": "bf16", "headroom": 1.0}
    plain = what_fits(LLAMA, "200MB", lengths=[64, 512], **how)
    rows = rows_of(plain.memory, 1.4)
    found = what_fits(LLAMA, "200MB", lengths=[64, 512], measured=rows, **how)
    for before, after in zip(plain.samples, found.samples, strict=True):
        assert after == pytest.approx(before / 1.4, rel=0.03)
    assert "measured=rows" in found.code
    budget = eval(found.code, {"MemoryBudget": MemoryBudget, "model": LLAMA, "rows": rows})
    assert tuple(budget.largest(np.array([64, 512])).tolist()) == found.samples


def test_a_regressor_fitted_to_a_traced_workload_only_raises_the_trace(tmp_path):
    table = rows_of(TRACED, 1.0, 40_000.0)
    regressor = MemoryRegressor.fit(table)
    unseen, first = BatchShape.of([1, 2, 30], [50, 700, 300]), BatchShape.of(20, 900)
    traced = TRACED.relative(unseen, first)
    predicted = regressor.relative(unseen, first)
    assert (predicted >= traced * (1 - 1e-6)).all()
    assert predicted[0] > 1.2 * traced[0]  # the constant weighs on small batches
    regressor.save(tmp_path / "own.ubj")
    assert MemoryRegressor.load(tmp_path / "own.ubj").relative(unseen, first) == pytest.approx(predicted)
    assert MemoryRegressor.pretrained(TRACED.workload).relative(unseen, first) == pytest.approx(traced)
