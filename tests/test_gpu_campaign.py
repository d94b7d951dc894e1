"""Every part of the GPU campaign runs on the CPU with tiny models, writes its file, and loses no sample of a rival."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu.__main__ import PARTS, main
from benchmarks.gpu.collect import collected, fit_of
from benchmarks.methods import METHODS, Job
from dynagroup.plan.work import Work

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    folder = tmp_path_factory.mktemp("campaign")
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--out", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs_dry_and_says_so(part, campaign):
    found = json.loads((campaign / f"gpu_{part}.json").read_text())
    assert found["dry"] is True
    cases = [found["figures"], *(case for case in found["figures"].values() if isinstance(case, dict))]
    assert not [
        case["failed"] for case in cases if case.get("failed") not in (None, {}) and "dynabatch" not in case["failed"]
    ]


def test_what_was_found_can_be_read(campaign, tmp_path):
    said = collected(campaign)
    assert all(f"{part}: " in said for part in PARTS)
    assert said.count("DRY") == len(PARTS)
    assert collected(tmp_path).count("not measured") == len(PARTS)


def test_the_fit_finds_the_price_that_made_the_times():
    work = Work(per_step=700, crossover=5000)
    shapes = [(1, 64), (16, 64), (4, 1024), (1, 8192)]
    times = [1e-6 * (700 + n * float(work.of_lengths(longest))) for n, longest in shapes]
    rows = [{"num_samples": n, "longest": longest, "seconds": s} for (n, longest), s in zip(shapes, times, strict=True)]
    found = fit_of(rows)
    assert found["per_step"] == pytest.approx(700, rel=1e-6)
    assert found["largest_error"] < 1e-6


@pytest.mark.parametrize("arguments", [["no_such_part"], ["--dry"]])
def test_what_cannot_be_run_is_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert "no_such_part" in (said := capsys.readouterr().err) or "--out" in said


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.available])
def test_every_method_keeps_to_its_memory_and_uses_no_sample_twice(name):
    lengths = np.clip(np.random.default_rng(0).lognormal(3, 1, 400), 1, 100).astype(np.int32)
    job = Job(lengths, per_update=32, tokens=400)
    updates = list(METHODS[name].updates(job, 0))
    for update in updates:
        for batch in update:
            cost = int(lengths[batch].sum()) if METHODS[name].packed else len(batch) * int(lengths[batch].max())
            assert cost <= job.tokens or not METHODS[name].capped
    if METHODS[name].same_updates:
        assert {sum(map(len, update)) for update in updates[:12]} == {32}
    used = [i for update in updates for batch in update for i in batch]
    assert len(set(used)) == len(used) >= 384
