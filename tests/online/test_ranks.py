"""Real gloo ranks: laws hold, and every fault ends in an error on every surviving rank instead of a hang."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torchrun import torchrun

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 120.0


def start(fault, size, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    script = str(ROOT / "tests" / "ranks" / "online_rank.py")
    return [
        subprocess.Popen(
            [sys.executable, script, fault, str(rank), str(size), str(tmp_path / "store")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        for rank in range(size)
    ]


def reports(fault, size, tmp_path, wait_for=None):
    processes = start(fault, size, tmp_path)
    found = {}
    try:
        order = [r for r in range(size) if r != wait_for] + ([wait_for] if wait_for is not None else [])
        for rank in order:
            process = processes[rank]
            if rank == wait_for:
                out, err = process.communicate(timeout=TIMEOUT_S)  # closes its stdin: it may end now
            else:
                process.wait(TIMEOUT_S)
                out, err = process.stdout.read(), process.stderr.read()
            lines = [line.split("REPORT ", 1)[1] for line in out.splitlines() if "REPORT " in line]
            found[rank] = json.loads(lines[0]) if lines else {"died": process.returncode, "stderr": err[-2000:]}
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                pipe.close()
    return found


def test_real_ranks_keep_the_laws(tmp_path):
    found = reports("none", 3, tmp_path)
    assert sorted(i for report in found.values() for i in report["ids"]) == list(range(200))
    assert len({report["steps"] for report in found.values()}) == 1


@pytest.mark.parametrize(
    ("fault", "of_faulty", "of_others"),
    [
        ("item_raises", "dataset item 77 raised KeyError", "rank . failed while it loaded data: .*dataset item 77"),
        ("worker_dies", "worker", "rank . failed while it loaded data: .*[Ww]orker"),
        ("wrong_lengths", "collate_fn made a batch", "rank 1 failed while it loaded data: .*collate_fn made a batch"),
        ("other_seed", "ranks differ in seed", "ranks differ in seed"),
    ],
)
def test_a_fault_reaches_every_rank(fault, of_faulty, of_others, tmp_path):
    found = reports(fault, 3, tmp_path)
    texts = [report.get("text", str(report)) for report in found.values()]
    assert sum(bool(re.search(of_others, text, re.S)) for text in texts) >= 2, texts
    assert all(re.search(f"{of_faulty}|{of_others}", text, re.S) for text in texts), texts


def test_a_killed_rank_ends_the_others(tmp_path):
    found = reports("rank_killed", 3, tmp_path)
    assert found[1]["died"] == -9
    for rank in (0, 2):
        assert found[rank]["error"] == "AlignmentError"
        assert "lost contact" in found[rank]["text"]


def test_a_rank_that_stops_early_ends_the_others_within_the_timeout(tmp_path):
    found = reports("stops_early", 3, tmp_path, wait_for=1)
    assert found[1]["steps"] == 3
    for rank in (0, 2):
        assert found[rank]["error"] == "AlignmentError"
        assert "lost contact" in found[rank]["text"]


def test_a_rank_that_starts_over_is_told_apart(tmp_path):
    found = reports("iterates_again", 2, tmp_path)
    for report in found.values():
        assert "different places" in report["text"]


def test_gradients_of_updates_equal_those_of_one_process():
    for report in torchrun("online_gradient.py", ranks=3):
        assert all(difference < 1e-6 for difference in report["difference"].values()), report
