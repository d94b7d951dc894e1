"""A planned loader on real gloo ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.torchrun import torchrun


def test_heavy_weights_and_a_stop_inside_an_update_on_real_ranks():
    reports = torchrun("planned_rank.py", ranks=2)
    assert sorted(i for report in reports for i in report["ids"]) == list(range(40))
    ends = [number for number, (_, end) in enumerate(reports[0]["scales"]) if end]
    assert ends == [number for number, (_, end) in enumerate(reports[1]["scales"]) if end]
    assert len(ends) == 4
    for before, end in pairwise([-1, *ends]):
        scales = [scale for report in reports for scale, _ in report["scales"][before + 1 : end + 1]]
        assert sum(scales) == pytest.approx(2.0, rel=1e-12), "one gradient over both ranks, stopped in between or not"
    assert reports[0]["samples"] == reports[1]["samples"] < 40, "of the second loader alone"
