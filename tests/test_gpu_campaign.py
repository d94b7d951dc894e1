"""Every part of the GPU campaign runs on the CPU with tiny models, writes its file, and loses no sample of a rival."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu.__main__ import PARTS, main
from benchmarks.gpu.methods import METHODS, Job, updates_of

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


@pytest.mark.parametrize("arguments", [["no_such_part"], ["--dry"]])
def test_what_cannot_be_run_is_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert "no_such_part" in (said := capsys.readouterr().err) or "--out" in said


@pytest.mark.parametrize("name", METHODS)
def test_every_method_keeps_to_the_memory_it_was_given(name):
    lengths = np.clip(np.random.default_rng(0).lognormal(3, 1, 400), 1, 100).astype(np.int32)
    job = Job(lengths, per_update=32, tokens=400)
    packed = METHODS[name].packed
    for update in islice(updates_of(name, job), 20):
        for batch in update:
            cost = int(lengths[batch].sum()) if packed else len(batch) * int(lengths[batch].max())
            assert cost <= job.tokens
        if METHODS[name].same_updates:
            assert sum(map(len, update)) == 32 or name.startswith("dynagroup")
    first = [i for update in islice(updates_of(name, job), 12) for batch in update for i in batch]
    assert len(set(first)) == len(first)
