"""The fault campaign in small, and proof that its oracle can find what it looks for."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.faults import FAULTS, RARE, Case, Seen, draws, judged, run_case

LENGTHS = [3, 2, 5]


def step(samples, *, scale=1.0, ends=True):
    weight = sum(LENGTHS[i] - 1 for i in samples)
    mean = sum((LENGTHS[i] - 1) * value(i) for i in samples) / weight if weight else 0.0
    return Seen(list(samples), scale * mean, ends)


def value(sample):
    from benchmarks.faults import value_of

    return value_of(sample)


SOUND = [[step([0, 1, 2])]]


def test_a_sound_epoch_is_found_sound():
    assert judged(LENGTHS, SOUND, Counter(range(3))) == []


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


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in RARE])
def test_no_case_of_a_short_campaign_is_wrong(fault):
    seeds = [seed for seed, drawn in (pair for _, pair in zip(range(60), draws(0), strict=False)) if drawn == fault]
    assert {seed: found for seed in seeds if (found := run_case(Case(seed, fault)))} == {}


@pytest.mark.slow
@pytest.mark.parametrize("fault", RARE)
def test_no_case_with_worker_processes_is_wrong(fault):
    assert run_case(Case(1, fault)) == []
