"""Simulated peaks are those of PyTorch's own allocator, in real training steps on the CPU: of kinds of models that are no plain
decoder. Attention is eager, because its operators are the same on every device. Samples are short, because the backward pass
of a softmax takes more for its scores on CUDA than on the CPU."""

import gc
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.memory_kinds import KINDS, Scoring, model_of
from dynagroup.jobs.scoring import Scorer
from dynagroup.memory import Workload, measure, simulate

SHAPES = [(64, 32), (96, 23)]
CPU = torch.device("cpu")


class CpuAllocator:
    """Its counters, of what the profiler records since the last reset; what was allocated before counts as 0."""

    device = CPU

    def __init__(self) -> None:
        self._profile: Any = None

    def reset(self) -> None:
        gc.collect()
        self._stop()
        self._profile = profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )
        self._profile.start()

    def allocated(self) -> int:
        return 0

    def peaks(self) -> tuple[int, int]:
        recorded = self._stop()
        changes = [event for event in recorded if event.name() == "[memory]"]
        changes.sort(key=lambda event: event.start_ns())
        alive = 0
        peak = 0
        for change in changes:
            alive += change.nbytes()
            peak = max(peak, alive)
        return peak, peak

    def _stop(self) -> list[Any]:
        if self._profile is None:
            return []
        self._profile.stop()
        recorded = self._profile.profiler.kineto_results.events()
        self._profile = None
        return recorded


@pytest.fixture
def device():
    allocator = CpuAllocator()
    yield allocator
    allocator.peaks()


def assert_as_allocated(
    model: Any, workload: Workload, device: CpuAllocator, inputs: Any = None
) -> None:
    real = measure(model, workload, SHAPES, inputs=inputs, device=device)
    simulated = simulate(model, workload, SHAPES, inputs=inputs)
    sizes = [row.batch_bytes for row in real]
    assert [row.batch_bytes for row in simulated] == pytest.approx(sizes, rel=0.01)


FAST = {"lora", "reentrant"}
EVERY_KIND = [
    name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in KINDS
]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # names that peft and older versions use
@pytest.mark.parametrize("name", EVERY_KIND)
def test_peaks_of_every_kind_are_those_of_the_allocator(name, device):
    kind = KINDS[name]
    model = model_of(kind, dry=True, device=CPU).float()
    if kind.layout == "padded":
        model.set_attn_implementation("eager")
    workload = Workload.from_model(model, "train", trace=False, layout=kind.layout)
    assert_as_allocated(model, workload, device, kind.inputs)


@pytest.mark.parametrize("keeps_outputs", [True, False])
def test_peaks_with_outputs_kept_and_freed_are_those_of_the_allocator(keeps_outputs, device):
    model = model_of(KINDS["gemma3"], dry=True, device=CPU).float()
    model.set_attn_implementation("eager")
    workload = Workload.from_model(model, "train", trace=False, keeps_outputs=keeps_outputs)
    assert_as_allocated(model, workload, device)


def test_scoring_allocates_what_its_budget_traced(device):
    model = model_of(KINDS["gemma3"], dry=True, device=CPU).float().eval()
    model.set_attn_implementation("eager")
    scorer = Scorer.of(model)
    workload = scorer.memory().traced.workload
    phases = workload.phases
    assert phases is not None
    real = measure(Scoring(scorer), workload.replace(phases=None), SHAPES, device=device)
    assert phases.bytes(real.shapes()) == pytest.approx(real.batch_bytes(), rel=0.01)
