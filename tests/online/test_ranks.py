"""Real gloo ranks: laws hold, and every fault ends in an error on every surviving rank instead of a hang."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.torchrun import HANG_S

ROOT = Path(__file__).parent.parent.parent


def start(fault, rank, size, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    script = str(ROOT / "tests" / "ranks" / "online_rank.py")
    command = [sys.executable, script, fault, str(rank), str(size), str(folder / "store")]
    with (folder / f"{rank}.err").open("w") as errors:
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=environment, cwd=ROOT)


def reports(fault, size, tmp_path, stays=None):
    """What each rank reports, or how it died. All stay until every one has; one that ``stays`` reports when asked to end."""
    processes = [start(fault, rank, size, tmp_path) for rank in range(size)]
    watch = threading.Timer(HANG_S, lambda: [process.kill() for process in processes])
    watch.start()
    try:
        found = {rank: report_of(processes[rank]) for rank in range(size) if rank != stays}
        if stays is not None:
            processes[stays].stdin.close()
            found[stays] = report_of(processes[stays])
    finally:
        watch.cancel()
        for process in processes:
            process.stdin.close()
            process.stdout.close()
            process.wait()
    for rank, process in enumerate(processes):
        if found[rank] is None:
            found[rank] = {"died": process.returncode, "stderr": (tmp_path / f"{rank}.err").read_text()[-2000:]}
    return found


def report_of(process):
    lines = (line.split("REPORT ", 1)[1] for line in process.stdout if "REPORT " in line)
    return next((json.loads(line) for line in lines), None)


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
    found = reports("stops_early", 3, tmp_path, stays=1)
    assert found[1]["steps"] == 3
    for rank in (0, 2):
        assert found[rank]["error"] == "AlignmentError"
        assert "lost contact" in found[rank]["text"]


def test_a_rank_that_starts_over_is_told_apart(tmp_path):
    found = reports("iterates_again", 2, tmp_path)
    for report in found.values():
        assert "different places" in report["text"]
