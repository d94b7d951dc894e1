"""The fault campaign in small, and proof that its oracle can find what it looks for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.faults.__main__ import FAULTS, RARE, draws, run_case
from benchmarks.faults.case import Case
from benchmarks.faults.memory import gradient_of
from benchmarks.faults.oracle import Seen, judged, over_budget, value_of
from dynagroup.oom import storage
from dynagroup.oom.train import Update
from tests.garbage import little_to_collect as little_to_collect

ROOT = Path(__file__).parent.parent
LENGTHS = [3, 2, 5]
FORKING = ("disk full", "killed while writing results", "journal cut or damaged")


def step(samples, *, scale=1.0, ends=True):
    weight = sum(LENGTHS[i] - 1 for i in samples)
    mean = sum((LENGTHS[i] - 1) * value_of(i) for i in samples) / weight if weight else 0.0
    return Seen(list(samples), scale * mean, ends)


SOUND = [[step([0, 1, 2])]]


def test_a_sound_epoch_is_found_sound():
    assert judged(LENGTHS, SOUND, Counter(range(3))) == []
    assert over_budget(LENGTHS, SOUND, 15) == over_budget(LENGTHS, SOUND, 10, packed=True) == []


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([[step([0, 1])]], "1 samples lost"),
        ([[step([0, 1, 2]), step([1])]], "1 samples repeated"),
        ([[step([0, 1, 2])], []], "unequal steps"),
        ([[step([0, 1, 2], scale=0.5)]], "gradient"),
        ([[step([0])], [step([1, 2], ends=False)]], "end at different steps"),
    ],
)
def test_every_violation_is_found(ranks, said):
    assert any(said in fault for fault in judged(LENGTHS, ranks, Counter(range(3))))


def test_a_batch_over_its_budget_is_found():
    assert over_budget(LENGTHS, SOUND, 14) == ["a batch of 3 samples holds 15 tokens, 14 fit"]
    assert over_budget(LENGTHS, SOUND, 9, packed=True) == ["a batch of 3 samples holds 10 tokens, 9 fit"]


def test_the_gradient_is_that_of_algebra():
    """One sample, two predicted tokens: every sum is one term."""
    case = Case(1, "none")
    case.lengths = [3]
    weight, scale, bias = gradient_of(case, [0])
    assert weight == pytest.approx(0.7 * bias)
    assert gradient_of(case, [0, 0]).tolist() == [weight, scale, bias], "a mean does not grow with its samples"


@pytest.mark.parametrize(
    ("fault", "first", "owner", "name", "said"),
    [
        ("out-of-memory storm in training", 0, Update, "undo", "gradient of update"),
        ("journal cut or damaged", 6, storage, "_checksum", "wrong results"),
    ],
)
def test_a_broken_library_is_found(fault, first, owner, name, said, monkeypatch):
    monkeypatch.setattr(owner, name, lambda *args: 0)
    found = (wrong for seed in range(first, 40) for wrong in run_case(Case(seed, fault)))
    assert any(said in wrong for wrong in found)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in (*RARE, *FORKING)])
def test_no_case_of_a_short_campaign_is_wrong(fault):
    seeds = [seed for seed, drawn in islice(draws(0), 70) if drawn == fault]
    assert {seed: found for seed in seeds if (found := run_case(Case(seed, fault)))} == {}


def test_no_case_with_processes_of_its_own_is_wrong():
    """In a fresh interpreter, since they fork; every fault at least once."""
    command = [sys.executable, "-m", "benchmarks.faults", "--cases", "19"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert set(json.loads(done.stdout)["by_fault"]) == set(FAULTS)
