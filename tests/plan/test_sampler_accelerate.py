"""Accelerate shards batch samplers itself: the sampler must come out whole, or refuse (facts read from accelerate 1.15)."""

from __future__ import annotations

import pytest

from dynagroup.testing import assert_conserves
from tests.torchrun import torchrun


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_accelerate_on_real_ranks(ranks: int) -> None:
    reports = torchrun("accelerate_sampler.py", ranks=ranks)
    for key in ("own", "resumed"):
        assert_conserves((batch for report in reports for batch in report[key]), range(200))
    for epoch in range(2):
        columns = [report["epochs"][epoch] for report in reports]
        assert len({len(column) for column in columns}) == 1
        assert_conserves((batch for column in columns for batch in column), range(200))
    assert reports[0]["length"] == len(reports[0]["epochs"][0])
    assert reports[0]["epochs"][0] != reports[0]["epochs"][1]  # the epoch moved on, though nobody could say set_epoch
    assert [report["resumed"] for report in reports] == [report["epochs"][1] for report in reports]
    if ranks == 1:
        assert reports[0]["prepared"] == reports[0]["epochs"][0]
    else:
        # sharded a second time, each rank would see only every ranks-th of its own batches
        assert all("would shard it a second time" in report["refused"] for report in reports)
