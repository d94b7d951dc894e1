"""Benchmarks: each part is there, methods lose no sample, and the fault campaign finds what it looks for."""

import json
import re
import subprocess
import sys
from collections import Counter
from functools import partial
from importlib import import_module
from itertools import chain, islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import ablation, infer, launching
from benchmarks.__main__ import COMMANDS, collected, main
from benchmarks.data import lognormal
from benchmarks.faults import loaders, memory
from benchmarks.faults.__main__ import FAULTS, draws, run_case
from benchmarks.faults.case import Case
from benchmarks.faults.oracle import Seen, judged, over_budget, value_of
from benchmarks.machine import Machine
from benchmarks.memory_kinds import KINDS, alive_at_peak, shown
from benchmarks.methods import METHODS, Job
from benchmarks.ranks import simulated
from dynagroup.jobs.storage import Output
from dynagroup.oom.train import Update
from tests.torchrun import ROOT

LENGTHS = [3, 2, 5]
BROKEN = [
    ("out-of-memory storm in training", 0, Update, "undo"),
    ("journal cut or damaged", 35, Output, "_checksum"),
]


def test_every_part_is_there_and_writes_a_result_of_its_own_and_others_are_refused(capsys):
    files = set()
    for parts in COMMANDS.values():
        for module, function, file in parts.values():
            assert callable(getattr(import_module(f"benchmarks.{module}"), function))
            assert file not in files
            files.add(file)
    for mechanism in ablation.MECHANISMS.values():
        assert hasattr(mechanism.module, mechanism.function)
    assert simulated(2, samples=64, window=16)["steps"] > 0
    for line in ("plan no_such_part", "no_such_command", "gpu --dry", "plan speed --device cuda"):
        with pytest.raises(SystemExit):
            main(line.split())
        assert re.search("no_such|--out|--device", capsys.readouterr().err)


def test_parts_may_stand_behind_options(capsys):
    """As ``scripts/gpu_campaign.sh`` puts them."""
    with pytest.raises(SystemExit):
        main("gpu --device cuda no_such_part".split())
    assert "gpu has no part 'no_such_part'" in capsys.readouterr().err


ABSENT = ("dynabatch", "sentence-transformers", "dynagroup, work as measured", "1.5B LoRA")
"""What may fail where it is not installed."""
BARE = """# a machine that has torch and transformers alone, and no network
import socket, sys
absent = "xgboost scipy datasets pyarrow trl accelerate matplotlib pandas PIL lightning odb dynabatch lhotse"
sys.modules |= dict.fromkeys(absent.split())
socket.socket.connect = socket.create_connection = None
from benchmarks.__main__ import main
sys.exit(main(["gpu", "--dry", "--out", sys.argv[1]]))
"""


def python(*words: str) -> str:
    """What a fresh interpreter prints; asserts that it ends well."""
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_gpu_campaign_runs_dry_and_says_so(tmp_path):
    python("-c", BARE, str(tmp_path))
    parts = COMMANDS["gpu"]
    summary = collected(tmp_path)
    assert summary.count("DRY") == len(parts)
    assert [part for part in parts if f"{part}: " not in summary] == []
    for part in parts:
        figures = json.loads((tmp_path / f"gpu_{part}.json").read_text())["figures"]
        cases = [case for case in figures.values() if isinstance(case, dict)]
        failed = list(chain.from_iterable(case.get("failed", {}) for case in [figures, *cases]))
        assert [name for name in failed if not name.startswith(ABSENT)] == []


def test_embedding_on_a_device_runs_dry(tmp_path):
    pytest.importorskip("sentence_transformers")
    python("-m", "benchmarks", "gpu", "embed", "--dry", "--out", str(tmp_path))
    figures = json.loads((tmp_path / "gpu_embed.json").read_text())["figures"]
    assert [*figures] == [*infer.ENCODERS]
    summary = collected(tmp_path)
    for case in figures.values():
        assert case["failed"] == {}
        assert len(case["methods"]) == 6
        for name, row in case["methods"].items():
            assert f"| {name} |" in summary
            assert row["run_again"] == 0
            assert row["largest_difference"] <= 1e-5
            assert row["speed"]["repeats"] == 3


def sleepy(machine, **ways):
    """Figures of ways that run no model, beside a figure for each pass."""
    lengths = np.array([3, 5])
    figures = {"texts": 2, "tokens": 8, "methods": {}, "failed": {}}
    seen = infer.Seen()

    def pass_of(way):
        seen.shapes.append((2, 5))
        way()

    methods = {name: infer.Way(int, partial(pass_of, way)) for name, way in ways.items()}
    passes = list(infer.compared(machine, methods, seen, figures, lengths, repeats=2))
    return passes, figures


def test_a_method_that_fails_costs_the_others_nothing_and_time_is_asked_before_each():
    def broken():
        raise MemoryError("too large")

    passes, figures = sleepy(Machine(dry=True), first=int, broken=broken, last=int)
    assert passes == ["first", None, "last", "first", "last"]
    assert figures["failed"] == {"broken": "MemoryError: too large"}
    row = figures["methods"]["last"]
    assert (row["batches"], row["padding"], row["speed"]["repeats"]) == (1, pytest.approx(0.2), 2)
    passes, figures = sleepy(Machine(minutes=0.0), first=int, last=int)
    assert passes == []
    assert figures["failed"] == {"first": "no time", "last": "no time"}


def test_vectors_of_other_texts_are_no_rounding():
    exact = np.random.default_rng(0).normal(size=(8, 4))
    vectors = {"rival": exact + 1e-3, "ours": exact - 1e-3, "swapped": exact[::-1]}
    case = {"methods": {name: {} for name in vectors}, "failed": {}}
    for name in vectors:
        infer.judge(case, name, vectors, exact[:2])
    assert [*case["failed"]] == ["swapped"]


@pytest.mark.slow
def test_every_kind_of_model_is_measured_dry(tmp_path):
    """With all packages, unlike the campaign above."""
    python("-m", "benchmarks", "gpu", "memory_kinds", "--dry", "--out", str(tmp_path))
    figures = json.loads((tmp_path / "gpu_memory_kinds.json").read_text())["figures"]
    assert figures["failed"] == {}
    assert figures["left_out"] == []
    assert {row["model"] for row in figures["rows"]} == {*KINDS, "qwen2", "scoring"}
    workloads = {row["model"]: json.loads(row["workload"]) for row in figures["rows"]}
    assert {workload["dtype"] for workload in workloads.values()} == {"bfloat16"}
    assert workloads["scoring"]["mode"] == "forward"
    assert workloads["reentrant"]["gradient_checkpointing"]
    assert workloads["lora"]["trainable_share"] < 1
    assert (workloads["varlen"]["layout"], workloads["varlen"]["attention"]) == ("packed", "flash")


def event(action, addr, size, *lines):
    """Of an allocator; the innermost line of the program first."""
    frames = [{"filename": name, "line": line, "name": "forward"} for name, line in lines]
    return {"action": action, "addr": addr, "size": size, "frames": frames}


def test_what_is_alive_at_the_peak_is_told_by_line_and_size():
    in_torch = ("torch/nn/functional.py", 1)
    in_model = ("transformers/models/gpt2/modeling_gpt2.py", 7)
    events = [
        event("free_requested", 9, 500),  # of before
        event("alloc", 1, 100, in_torch, in_model),
        event("alloc", 2, 100, in_torch, in_model),
        event("alloc", 3, 60, in_torch),
        event("free_requested", 1, 100),
        event("free_completed", 1, 100),
        event("alloc", 1, 400),
        event("free_requested", 1, 400),
        event("alloc", 4, 300),
    ]
    alive = [(group["line"], group["total"]) for group in alive_at_peak(events, most=2)]
    of_model = "modeling_gpt2.py:7 forward"
    assert alive == [("backward pass", 400), (of_model, 100), ("others", 60)]


def test_a_loop_is_shown_with_what_its_simulation_lacks_and_what_is_alive():
    group = {"line": "backward pass", "size": 10**9, "number": 2, "total": 2 * 10**9}
    row = {
        "model": "qwen2",
        "mode": "train, outputs freed",
        "outputs": "freed",
        "oom": False,
        "num_samples": 4,
        "longest_tokens": 8,
        "static_bytes": 10**9,
        "batch_bytes": 4 * 10**9,
        "reserved_bytes": 6 * 10**9,
        "simulated_batch_bytes": 3 * 10**9,
        "alive": [group, {"line": "others", "number": 7, "total": 10**9}],
    }
    lines = shown({"rows": [row]})
    assert "| freed | 4 | 8 | -1.000 GB | 1.000 GB |" in lines
    assert "| backward pass | 1,000,000,000 | 2 | 2.000 GB |" in lines
    assert "| others |  | 7 | 1.000 GB |" in lines


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.available])
def test_every_method_keeps_to_its_memory_and_uses_no_sample_twice(name):
    method = METHODS[name]
    job = Job(lognormal(400, mean=33, cv=1.3, longest=100), per_update=32, tokens=400)
    setting = method.tried(job)[0]
    updates = list(method.updates(job, 0, setting))
    if method.capped:
        for batch in chain.from_iterable(updates):
            lengths = job.lengths[batch]
            tokens = lengths.sum() if method.packed else len(batch) * lengths.max()
            assert tokens <= job.tokens
    samples = [list(chain.from_iterable(update)) for update in updates]
    if method.same_updates:
        drawn = job.order(0)[:384].reshape(12, 32)
        assert [set(update) for update in samples[:12]] == [set(update) for update in drawn]
    used = Counter(chain.from_iterable(samples))
    assert set(used.values()) == {1}
    assert len(used) >= 384


def test_every_way_of_launching_has_the_same_gradients_and_graphs_never_wait(monkeypatch):
    """On the CPU, where a graph's shapes are run in the same inputs, and waiting for the device is an error."""
    ways = {name: way for name, way in launching.WAYS.items() if not way.launch.compiles}
    monkeypatch.setattr(launching, "WAYS", ways)
    *_, figures = launching.run(Machine("cpu", dry=True))
    assert figures["failed"] == {}
    assert [*figures["methods"]] == [*ways]
    gradients = [found["first_gradient"] for found in figures["methods"].values()]
    assert gradients == pytest.approx([gradients[0]] * len(ways), rel=1e-4)
    with_graphs = [found for name, found in figures["methods"].items() if "graph" in name]
    assert [found["eager_batches"] for found in with_graphs] == [0] * len(with_graphs)
    assert with_graphs[0]["captured_shapes"] <= 8


def test_what_waits_for_the_device_is_found_on_the_cpu():
    with launching.NoSynchronisation(), pytest.raises(RuntimeError, match="waits for the device"):
        torch.ones(2).sum().item()


@given(st.integers(1, 40), st.integers(1, 40))
def test_filling_to_powers_of_two_adds_no_label(rows, width):
    ids = torch.ones(rows, width, dtype=torch.int64)
    filled = launching.filled_to_powers({"input_ids": ids, "labels": ids})
    new_rows, new_width = filled["input_ids"].shape
    assert new_rows.bit_count() == new_width.bit_count() == 1
    assert rows <= new_rows < 2 * rows
    assert width <= new_width < 2 * width
    assert int((filled["labels"] != -100).sum()) == rows * width
    assert torch.equal(filled["input_ids"][:rows, :width], ids)


def step(samples, *, scale=1.0, ends=True):
    weights = [LENGTHS[i] - 1 for i in samples]
    values = [value_of(i) for i in samples]
    mean = np.average(values, weights=weights) if samples else 0.0
    return Seen(list(samples), scale * float(mean), ends)


def test_every_violation_is_found():
    everything = Counter(range(3))
    violations = {
        "1 samples lost": [[step([0, 1])]],
        "1 samples repeated": [[step([0, 1, 2]), step([1])]],
        "unequal steps": [[step([0, 1, 2])], []],
        "gradient": [[step([0, 1, 2], scale=0.5)]],
        "end at different steps": [[step([0])], [step([1, 2], ends=False)]],
    }
    for message, ranks in violations.items():
        faults = judged(LENGTHS, ranks, everything)
        assert any(message in fault for fault in faults), message


def test_a_sound_run_has_no_fault_and_its_batches_are_measured():
    sound = [[step([0, 1, 2])]]
    assert judged(LENGTHS, sound, Counter(range(3))) == []
    assert over_budget(LENGTHS, sound, 15) == []
    assert over_budget(LENGTHS, sound, 14) == ["a batch of 3 samples holds 15 tokens, 14 fit"]
    assert over_budget(LENGTHS, sound, 10, packed=True) == []
    faults = over_budget(LENGTHS, sound, 9, packed=True)
    assert faults == ["a batch of 3 samples holds 10 tokens, 9 fit"]


def test_the_expected_gradient_of_a_mean_does_not_grow_with_its_samples():
    case = Case(1, "none")
    case.lengths = [3]  # one sample, two predicted tokens: every sum is one term
    weight, scale, bias = memory.gradient_of(case, [0])
    assert weight == pytest.approx(0.7 * bias)
    assert memory.gradient_of(case, [0, 0]).tolist() == [weight, scale, bias]


@pytest.mark.parametrize(("fault", "first", "owner", "name"), BROKEN)
def test_a_broken_library_is_found(fault, first, owner, name, monkeypatch):
    monkeypatch.setattr(owner, name, lambda *args: 0)
    cases = (Case(seed, fault) for seed in range(first, 40))
    faults = chain.from_iterable(map(run_case, cases))
    assert any(re.search("gradient of update|wrong results", fault) for fault in faults)


@pytest.mark.parametrize("fault", [*loaders.FAULTS, *memory.FAULTS])
def test_no_case_of_a_short_campaign_is_wrong(fault):
    for seed, drawn in islice(draws(), 70):
        if drawn == fault:
            assert run_case(Case(seed, fault)) == [], seed


@pytest.mark.parametrize(
    ("first", "cases"), [(8, 5), pytest.param(0, 15, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_no_case_with_processes_of_its_own_is_wrong(first, cases):
    """In a fresh interpreter, since they fork: what kills processes, or every fault."""
    printed = python("-m", "benchmarks.faults", "--first", str(first), "--cases", str(cases))
    run = json.loads(printed)
    assert [*run["by_fault"]] == [*FAULTS][first : first + cases]
    assert "rank killed, others resume" in run["by_fault"]


@pytest.mark.parametrize("mechanism", ablation.MECHANISMS.values(), ids=ablation.MECHANISMS)
def test_a_plan_without_a_mechanism_holds_every_sample_once(mechanism, monkeypatch):
    monkeypatch.setattr(ablation, "SAMPLES", 200)
    monkeypatch.setattr(ablation, "LARGE", 2000)
    plans = list(ablation.cases(mechanism.layout).values())
    monkeypatch.setattr(mechanism.module, mechanism.function, mechanism.instead)
    num_samples = 2000 if mechanism.layout == "large" else 200
    for plan_of in (plans[0], plans[-1]):
        samples = chain.from_iterable(plan_of().batches)
        assert set(samples) == set(range(num_samples))
