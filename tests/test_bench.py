"""Benchmarks: every part is there, the GPU campaign runs dry on the CPU, rivals lose no sample, and the fault campaign's oracle
finds what it looks for."""

import json
import subprocess
import sys
from collections import Counter
from importlib import import_module
from itertools import islice

import numpy as np
import pytest

from benchmarks.__main__ import COMMANDS, collected, main
from benchmarks.faults.__main__ import FAULTS, RARE, draws, run_case
from benchmarks.faults.case import Case
from benchmarks.faults.memory import gradient_of
from benchmarks.faults.oracle import Seen, judged, over_budget, value_of
from benchmarks.methods import METHODS, Job
from dynagroup.oom import storage
from dynagroup.oom.train import Update
from tests.torchrun import ROOT


def test_every_part_is_there_and_writes_a_result_of_its_own():
    parts = [part for parts in COMMANDS.values() for part in parts.values()]
    for module, function, _ in parts:
        assert callable(getattr(import_module(f"benchmarks.{module}"), function))
    assert len({name for _, _, name in parts}) == len(parts)


@pytest.mark.parametrize("line", ["plan no_such_part", "no_such_command", "gpu --dry"])
def test_what_cannot_be_run_is_refused(line, capsys):
    with pytest.raises(SystemExit):
        main(line.split())
    said = capsys.readouterr().err
    assert any(word in said for word in ("no_such", "--out", "--device"))


BARE = """
import socket, sys
absent = "xgboost scipy datasets pyarrow trl accelerate matplotlib pandas PIL lightning odb dynabatch lhotse"
for name in absent.split():
    sys.modules[name] = None
def no_network(*args, **kwargs):
    raise OSError("the campaign asked for the network")
socket.socket.connect = socket.create_connection = no_network
from benchmarks.__main__ import main
sys.exit(main(["gpu", "--dry", "--out", sys.argv[1]]))
"""
"""The campaign on a machine that has torch and transformers alone, and no network."""


@pytest.mark.slow
def test_the_gpu_campaign_runs_dry_and_says_so(tmp_path):
    done = subprocess.run([sys.executable, "-c", BARE, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (said := collected(tmp_path)).count("DRY") == len(COMMANDS["gpu"])
    for part in COMMANDS["gpu"]:
        assert f"{part}: " in said
        found = json.loads((tmp_path / f"gpu_{part}.json").read_text())["figures"]
        cases = [found, *(case for case in found.values() if isinstance(case, dict))]
        assert [case["failed"] for case in cases if case.get("failed") and "dynabatch" not in case["failed"]] == []


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.available])
def test_every_method_keeps_to_its_memory_and_uses_no_sample_twice(name):
    lengths = np.clip(np.random.default_rng(0).lognormal(3, 1, 400), 1, 100).astype(np.int32)
    job = Job(lengths, per_update=32, tokens=400)
    updates = list(METHODS[name].updates(job, 0, METHODS[name].tried(job)[0]))
    for update in updates:
        for batch in update:
            cost = int(lengths[batch].sum()) if METHODS[name].packed else len(batch) * int(lengths[batch].max())
            assert cost <= job.tokens or not METHODS[name].capped
    if METHODS[name].same_updates:
        drawn = [{i for batch in update for i in batch} for update in updates[:12]]
        assert drawn == [set(part) for part in job.order(0)[:384].reshape(12, 32).tolist()]
    used = [i for update in updates for batch in update for i in batch]
    assert len(set(used)) == len(used) >= 384


LENGTHS = [3, 2, 5]
FORKING = ("disk full", "killed while writing results", "journal cut or damaged")


def step(samples, *, scale=1.0, ends=True):
    weight = sum(LENGTHS[i] - 1 for i in samples)
    mean = sum((LENGTHS[i] - 1) * value_of(i) for i in samples) / weight if weight else 0.0
    return Seen(list(samples), scale * mean, ends)


SOUND = [[step([0, 1, 2])]]


@pytest.mark.parametrize(("ranks", "said"), [
    (SOUND, None),
    ([[step([0, 1])]], "1 samples lost"),
    ([[step([0, 1, 2]), step([1])]], "1 samples repeated"),
    ([[step([0, 1, 2])], []], "unequal steps"),
    ([[step([0, 1, 2], scale=0.5)]], "gradient"),
    ([[step([0])], [step([1, 2], ends=False)]], "end at different steps"),
])  # fmt: skip
def test_every_violation_is_found(ranks, said):
    found = judged(LENGTHS, ranks, Counter(range(3)))
    assert any(said in fault for fault in found) if said else found == []


def test_batches_over_their_budget_and_wrong_gradients_are_found():
    assert over_budget(LENGTHS, SOUND, 15) == over_budget(LENGTHS, SOUND, 10, packed=True) == []
    assert over_budget(LENGTHS, SOUND, 14) == ["a batch of 3 samples holds 15 tokens, 14 fit"]
    assert over_budget(LENGTHS, SOUND, 9, packed=True) == ["a batch of 3 samples holds 10 tokens, 9 fit"]
    case = Case(1, "none")
    case.lengths = [3]  # one sample, two predicted tokens: every sum is one term
    weight, scale, bias = gradient_of(case, [0])
    assert weight == pytest.approx(0.7 * bias)
    assert gradient_of(case, [0, 0]).tolist() == [weight, scale, bias], "a mean does not grow with its samples"


@pytest.mark.parametrize(("fault", "first", "owner", "name", "said"), [
    ("out-of-memory storm in training", 0, Update, "undo", "gradient of update"),
    ("journal cut or damaged", 35, storage.Output, "_checksum", "wrong results"),
])  # fmt: skip
def test_a_broken_library_is_found(fault, first, owner, name, said, monkeypatch):
    monkeypatch.setattr(owner, name, lambda *args: 0)
    found = (wrong for seed in range(first, 40) for wrong in run_case(Case(seed, fault)))
    assert any(said in wrong for wrong in found)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in (*RARE, *FORKING)])
def test_no_case_of_a_short_campaign_is_wrong(fault):
    seeds = [seed for seed, drawn in islice(draws(0), 70) if drawn == fault]
    assert {seed: found for seed in seeds if (found := run_case(Case(seed, fault)))} == {}


@pytest.mark.slow
def test_no_case_with_processes_of_its_own_is_wrong():
    """In a fresh interpreter, since they fork; every fault at least once."""
    command = [sys.executable, "-m", "benchmarks.faults", "--cases", "15"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert set(json.loads(done.stdout)["by_fault"]) == set(FAULTS)
