"""Every part of the GPU campaign runs on the CPU with tiny models, writes its file, and loses no sample of a rival."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import train
from benchmarks.__main__ import COMMANDS, collected, main
from benchmarks.methods import METHODS, Job
from benchmarks.price import fit_of
from dynagroup import Work

ROOT = Path(__file__).parent.parent
PARTS = list(COMMANDS["gpu"])


BARE = """
import socket, sys
for name in ("xgboost", "scipy", "datasets", "pyarrow", "trl", "accelerate", "matplotlib", "pandas", "PIL", "lightning"):
    sys.modules[name] = None
def no_network(*args, **kwargs):
    raise OSError("the campaign asked for the network")
socket.socket.connect = socket.create_connection = no_network
from benchmarks.__main__ import main
sys.exit(main(["gpu", "--dry", "--out", sys.argv[1]]))
"""
"""The campaign on a machine that has torch and transformers alone, and no network."""


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    folder = tmp_path_factory.mktemp("campaign")
    done = subprocess.run([sys.executable, "-c", BARE, str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs_dry_and_says_so(part, campaign):
    found = json.loads((campaign / f"gpu_{part}.json").read_text())
    assert found["dry"] is True
    cases = [found["figures"], *(case for case in found["figures"].values() if isinstance(case, dict))]
    wrong = [case["failed"] for case in cases if case.get("failed")]
    assert not [failed for failed in wrong if "dynabatch" not in failed]


def test_what_was_found_can_be_read(campaign, tmp_path):
    said = collected(campaign)
    assert all(f"{part}: " in said for part in PARTS)
    assert said.count("DRY") == len(PARTS)
    assert collected(tmp_path).count("not measured") == len(PARTS)


class Clock:
    """A device on which time passes as told."""

    dry, is_gpu = False, True

    def __init__(self):
        self.passed = 0.0

    def left_s(self):
        return 60 * 8.5 - self.passed

    def free(self):
        pass

    def warm_up(self):
        pass


@pytest.mark.parametrize("seconds_a_turn", [3.0, 12.0, 45.0])
def test_training_ends_in_time_and_keeps_what_it_has(seconds_a_turn, monkeypatch):
    turns = []

    class Turn:
        def __init__(self, name, job, machine, *model):
            self.machine, self.timed = machine, []

        def turn(self, seconds=0.0):
            self.machine.passed += seconds_a_turn
            self.timed.append(seconds)
            turns.append(seconds)

        def figures(self):
            return {"turns": len(self.timed)}

    monkeypatch.setattr(train, "Run", Turn)
    monkeypatch.setattr(train, "tokens_that_fit", lambda machine, size: 16_384)
    clock, kept = Clock(), {}
    for figures in train.run(clock):
        kept = json.loads(json.dumps(figures))
    assert clock.left_s() >= 0
    done = [case["methods"] for case in kept.values() if "methods" in case]
    assert done
    tried = turns.count(0.0)  # of each case the hardest batch
    assert sum(one["turns"] for methods in done for one in methods.values()) == clock.passed / seconds_a_turn - tried


def test_a_batch_that_the_device_has_no_room_for_makes_the_next_ones_smaller(monkeypatch):
    tried = []

    class Turn:
        def __init__(self, name, job, *model):
            self.job = job

        def turn(self):
            tried.append(self.job.tokens)
            if self.job.tokens > 12_500:
                raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(train, "Run", Turn)
    monkeypatch.setattr(train, "tokens_that_fit", lambda machine, size: 16_384)
    assert train.job_that_fits(Clock(), train.Case("0.5B", "CV 1.0")).tokens == 12_288
    assert tried == [16_384, 12_288]


def test_the_fit_finds_the_price_that_made_the_times():
    work = Work(per_step=700, crossover=5000)
    shapes = [(1, 64), (16, 64), (4, 1024), (1, 8192)]
    times = [1e-6 * (700 + n * float(work.of_lengths(longest))) for n, longest in shapes]
    rows = [{"num_samples": n, "longest": longest, "seconds": s} for (n, longest), s in zip(shapes, times, strict=True)]
    found = fit_of(rows)
    assert found["per_step"] == pytest.approx(700, rel=1e-6)
    assert found["largest_error"] < 1e-6


@pytest.mark.parametrize("arguments", [["gpu", "no_such_part"], ["gpu", "--dry"], ["gpu"], ["no_such_command"]])
def test_what_cannot_be_run_is_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    said = capsys.readouterr().err
    assert "no_such" in said or "--out" in said or "--device" in said


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
