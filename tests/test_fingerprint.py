"""Settings as text, alike in every process, and otherwise wherever they act otherwise; the envelope of every saved state."""

import collections
import functools
import json
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynagroup import (
    AdditiveCap,
    Budget,
    MemoryBudget,
    StateError,
    TokenBudget,
    friendly_size,
    multiple_of,
)
from dynagroup.fingerprint import described
from dynagroup.state import agreed, listed, opened, sealed
from tests.torchrun import ROOT

PROGRAM = """
import json, sys
from tests.test_fingerprint import ALIKE, DIFFERENT, described
print(json.dumps([described(v) for pairs in (ALIKE, DIFFERENT) for pair in pairs.values() for v in pair]))
"""
IDENTITY = {"seed": 0}
STATE = sealed("Loader", IDENTITY, {"epoch": 2, "segments": [[2, 3]], "order": None})
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


def make(limit, scale=1):
    return lambda n: min(n * scale, limit)


class Holder:
    def __init__(self, limit, steps=0):
        self.limit, self.steps = limit, steps

    def rule(self, n):
        return n * self.limit

    @property
    def through(self):
        return lambda n: self.rule(n)

    def twice(self, n):
        return self.through(self.through(n))

    def relative(self, shape, baseline):
        return self.limit * shape.num_samples / baseline.num_samples


def own_budget(constant, kind="code"):
    class Quadratic(Budget):
        def fits(self, shape, /):
            return shape.num_samples <= constant

    return Quadratic()


class Slotted:
    __slots__ = ("limit",)

    def __init__(self, limit):
        self.limit = limit


LARGE = np.arange(5000)
OTHER = np.where(LARGE == 2500, 0, LARGE)
DIFFERENT = {
    "lambda": (lambda n: n * 2, lambda n: n * 3),
    "closure": (make(3), make(4)),
    "closure over a function": (
        (lambda f: lambda n: f(n))(make(3)),
        (lambda f: lambda n: f(n))(make(4)),
    ),
    "default": (lambda n, k=1: n, lambda n, k=2: n),
    "a budget's number": (TokenBudget(16), TokenBudget(17)),
    "nested code": (lambda: [x + 1 for x in ()], lambda: [x + 2 for x in ()]),
    "partial": (functools.partial(pow, 2), functools.partial(pow, 3)),
    "large array": (LARGE, OTHER),
    "tensor": (torch.zeros(3000), torch.zeros(3000).index_fill(0, torch.tensor([1500]), 1.0)),
    "bound method": (Holder(3).rule, Holder(4).rule),
    "what it calls": (Holder(3).twice, Holder(4).twice),
    "array in an object": (Holder(LARGE), Holder(OTHER)),
    "read through a closure": (
        (lambda h: lambda n: h.limit)(Holder(3)),
        (lambda h: lambda n: h.limit)(Holder(4)),
    ),
    "object": (Holder(3), Holder(4)),
    "constant outside the attributes": (own_budget(3), own_budget(4)),
    "long text": ("a" * 900, "a" * 899 + "b"),
    "name": (friendly_size, multiple_of(8)),
    "a budget's model": tuple(
        MemoryBudget(2, longest=8, model=Holder(factor)) for factor in (1, 2)
    ),
    "set": ({1, 2}, {1, 3}),
    "what is held by name": (torch.float32, torch.float64),
    "arguments of a pickle": (torch.device("cpu"), torch.device("meta")),
    "items of a mapping": (collections.OrderedDict(a=1), collections.OrderedDict(a=2)),
    "class attribute": (type("Own", (), {"k": 1})(), type("Own", (), {"k": 2})()),
    "slots": (Slotted(1), Slotted(2)),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_acts_otherwise_is_described_otherwise(one, other):
    assert described(one) != described(other)
    assert described(one) == described(one)
    assert " at 0x" not in described(one) + described(other)


ALIKE = {
    "two makings of a closure": (make(3), make(np.int64(3))),
    "numpy numbers": (np.float64(0.5), 0.5),
    "a budget's numbers": tuple(
        TokenBudget(most) & AdditiveCap("patches", 4) for most in (np.int64(16), 16)
    ),
    "order of a mapping": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "state that code does not read": (Holder(3, steps=1).rule, Holder(3, steps=9).rule),
    "two copies of an array": (LARGE, LARGE.copy()),
    "list and tuple, as JSON gives them back": ((1, 2), [1, 2]),
    "what only computing it again would cost": (own_budget(3), own_budget(3)),
}


def test_what_acts_alike_is_described_alike_in_another_process_too():
    assert [
        name for name, (one, other) in ALIKE.items() if described(one) != described(other)
    ] == []
    here = [described(v) for pairs in (ALIKE, DIFFERENT) for pair in pairs.values() for v in pair]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == here


def test_recursion_ends_what_cannot_be_seen_is_warned_of_and_an_objects_own_fingerprint_goes_first():
    def factorial(n):
        return 1 if n < 2 else n * factorial(n - 1)

    ring = []
    ring.append(ring)
    circle = Holder(None)
    circle.limit = circle
    assert described(factorial) == described(factorial)
    assert described(ring) == "(^1)"
    assert described(circle) == described(circle)
    with pytest.warns(UserWarning, match="thread.lock.*`fingerprint`"):
        assert described(Holder(threading.Lock())) == described(Holder(threading.Lock()))
    with pytest.warns(UserWarning, match="generator"):
        described({"order": (n for n in range(3))})
    held = Holder(threading.Lock())
    held.fingerprint = "mine-3"
    assert described([held]) == "(mine-3)"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"epoch": 3}, "damaged: its content does not match its checksum"),
        ({"more": 1}, "not match its checksum"),
        ({3: 1}, "not match its checksum"),
        ({"identity": 3}, "not match its checksum"),
        ({"version": 1}, "has version 1, but dynagroup reads 4"),
        ({"kind": "Other"}, "of Loader, but got one of 'Other'"),
    ],
)
def test_what_is_damaged_is_named(change, said):
    with pytest.raises(StateError, match=said):
        opened({**STATE, **change}, "Loader", IDENTITY)


def test_a_state_of_another_run_says_what_differs_and_ranks_agree_but_for_what_each_learned():
    for identity, said in (
        ({"seed": 1}, "seed was 1 then, is 0 now"),
        ({}, "seed was None then, is 0 now"),
    ):
        with pytest.raises(StateError, match=said):
            opened(sealed("Loader", identity, {}), "Loader", IDENTITY)
    for no_states in (None, [], 3, "state"):
        with pytest.raises(StateError, match="one saved state, or the list of all ranks' states"):
            listed(no_states)
    assert agreed([{**STATE, "learned": 2}, {**STATE, "learned": 3, "seal": "x"}])["learned"] == 2
    with pytest.raises(StateError, match="after different steps"):
        agreed([STATE, {**STATE, "epoch": 3}])


@given(json_values, st.sampled_from([None, *STATE]))
def test_nothing_but_state_errors_comes_out(value, key):
    state = value if key is None else {**STATE, key: value}
    try:
        assert opened(state, "Loader", IDENTITY) == [state]
    except StateError:
        assert state != STATE
