"""Peaks of a CUDA device, with its statistics stood in for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dynagroup.oom import LearningBudget, OomSafeBackward
from dynagroup.oom.peak import PeakWatch


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the allocator's peak is said to be: the last entry."""
    readings = [100]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: readings[-1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2000))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 0.5, raising=False)
    return readings


def test_only_a_new_peak_says_something_about_this_batch(peaks: list[int]) -> None:
    watch = PeakWatch(torch.device("cuda"))
    assert watch.new_peak() == (None, None)
    peaks.append(700)
    assert watch.new_peak() == (700, 1000)
    assert watch.new_peak() == (None, None)


def test_a_cpu_has_no_peak() -> None:
    assert PeakWatch(torch.device("cpu")).new_peak() == (None, None)


def test_a_training_step_that_nearly_fills_the_device_limits_the_next(peaks: list[int]) -> None:
    model = torch.nn.Linear(2, 1)
    backward = OomSafeBackward(model, weigh="samples", learned=LearningBudget())
    backward._peak = PeakWatch(torch.device("cuda"))

    def loss(x: torch.Tensor) -> Any:
        peaks.append(960 if len(x) == 4 else 500)
        return model(x).mean()

    assert backward(loss, torch.ones(4, 2)).num_parts == 1
    assert backward(loss, torch.ones(6, 2)).num_parts == 2
    assert backward(loss, torch.ones(4, 2)).num_parts == 1
