"""Every fault of a rank ends in an error on every surviving one instead of a hang."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from dynagroup.testing import run_ranks
from tests.online.helpers import Tokens, lengths_of, make_loader
from tests.torchrun import HANG_S

ROOT = Path(__file__).parent.parent.parent


class Faulty(Tokens):
    fault = ""

    def __getitem__(self, index: int) -> Any:
        if self.fault == "item_raises" and index == 77:
            raise KeyError("broken record")
        if self.fault == "worker_dies" and index == 77:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def fourth_of(sample: Any) -> int:
    return len(sample["input_ids"]) // 4


def text_of(world: Any, fault: str) -> str:
    """How the run of a rank ends; what is strange is strange on rank 1."""
    data, strange = Faulty(lengths_of(2000 if fault == "starts_over" else 200, seed=3)), world.rank == 1
    data.fault = fault
    options: dict[str, Any] = {"num_workers": 2} if fault == "worker_dies" else {}
    if strange:
        options |= {"other_seed": {"seed": 5}, "wrong_lengths": {"length_of": fourth_of}}.get(fault, {})
    loader = make_loader(world, [], dataset=lambda _: data, window=8, **options)
    try:
        list(islice(loader, 3 if fault == "starts_over" and strange else None))
        list(loader)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "ended"


@pytest.mark.parametrize(
    ("fault", "of_faulty", "of_others"),
    [
        ("item_raises", r"dataset items \[77\] raised KeyError", r"rank . failed while it loaded data: .*items \[77\]"),
        ("worker_dies", "worker", "rank . failed while it loaded data: .*[Ww]orker"),
        ("wrong_lengths", "collate_fn made a batch", "rank 1 failed while it loaded data: .*collate_fn made a batch"),
        ("other_seed", "ranks differ in seed", "ranks differ in seed"),
        ("starts_over", "different exchanges", "different exchanges"),
    ],
)
def test_a_fault_reaches_every_rank(fault: str, of_faulty: str, of_others: str) -> None:
    texts = run_ranks(3, lambda world: text_of(world, fault))
    assert sum(bool(re.search(of_others, text, re.S)) for text in texts) >= 2, texts
    assert all(re.search(f"{of_faulty}|{of_others}", text, re.S) for text in texts), texts


def start(fault: str, rank: int, size: int, folder: Path) -> Any:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    script = str(ROOT / "tests" / "ranks" / "online_rank.py")
    command = [sys.executable, script, fault, str(rank), str(size), str(folder / "store")]
    with (folder / f"{rank}.err").open("w") as errors:
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=environment, cwd=ROOT)


def report_of(process: Any) -> Any:
    lines = (line.split("REPORT ", 1)[1] for line in process.stdout if "REPORT " in line)
    return next((json.loads(line) for line in lines), None)


@pytest.mark.parametrize("fault", ["rank_killed", pytest.param("stops_early", marks=pytest.mark.slow)])
def test_a_rank_that_is_lost_ends_the_others(fault: str, tmp_path: Path) -> None:
    """Three real ranks; all stay until the others have reported."""
    processes = [start(fault, rank, 3, tmp_path) for rank in range(3)]
    watch = threading.Timer(HANG_S, lambda: [process.kill() for process in processes])
    watch.start()
    try:
        found = [report_of(processes[rank]) for rank in (0, 2)]
    finally:
        watch.cancel()
        for process in processes:
            process.stdin.close()
            process.stdout.close()
            process.wait()
    assert fault != "rank_killed" or processes[1].returncode == -9
    for rank, report in zip((0, 2), found, strict=True):
        assert report is not None, (tmp_path / f"{rank}.err").read_text()[-2000:]
        assert report["error"] == "AlignmentError"
        assert "lost contact" in report["text"]
