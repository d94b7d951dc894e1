"""Settings as text, alike in every process, that changes with values and never with code; the envelope of every state."""

import collections
import dataclasses
import datetime
import enum
import functools
import json
import subprocess
import sys
import threading
import types

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
from dynagroup.fingerprint import described, tokenizer_text
from dynagroup.online.messages import number_of
from dynagroup.state import VERSION, agreed, listed, opened, sealed
from tests.models import small_tokenizer
from tests.torchrun import ROOT

PROGRAM = """
import json
from tests.test_fingerprint import texts
print(json.dumps(texts()))
"""
IDENTITY = {"seed": 0}
STATE = sealed("Loader", IDENTITY, {"epoch": 2, "segments": [[2, 3]], "order": None})


def containers_of(values):
    return st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3)


json_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
json_values = st.recursive(
    json_scalars,
    containers_of,
    max_leaves=6,
)


def make(limit):
    return lambda n: min(n, limit)


def double(n):
    return 2 * n


class Holder:
    def __init__(self, limit):
        self.limit = limit

    @functools.cached_property
    def table(self):
        return list(range(self.limit))

    def rule(self, n):
        return n * self.limit

    def relative(self, shape, baseline):
        return self.limit * shape.num_samples / baseline.num_samples


class Own(Budget):
    def __init__(self, limit):
        self.limit = limit

    def fits(self, shape, /):
        return shape.num_samples <= self.limit


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(slots=True)
class Slotted:
    limit: int


def array_of_objects(*values):
    return np.array(values, object)


def memory(limit):
    return MemoryBudget(2, longest=8, model=Holder(limit))


def capped(max_tokens):
    return TokenBudget(max_tokens) & AdditiveCap("patches", 4)


LARGE = np.arange(5000)
OTHER = np.where(LARGE == 2500, 0, LARGE)
FIRST_DAY = datetime.date(2020, 1, 1)
SECOND_DAY = datetime.date(2020, 1, 2)
ZEROS = torch.zeros(3000)
ONE_IS_SET = (torch.arange(3000) == 1500).float()
DIFFERENT = {
    "a function's name": (double, make(3)),
    "name": (friendly_size, multiple_of(8)),
    "rule": (multiple_of(16), multiple_of(8)),
    "set": ({1, 2}, {1, 3}),
    "enum": (Colour.RED, Colour.BLUE),
    "date": (FIRST_DAY, SECOND_DAY),
    "module": (np, torch),
    "class": (Holder, Own),
    "tensor": (ZEROS, ONE_IS_SET),
    "dtype": (torch.float32, torch.float64),
    "large array": (LARGE, OTHER),
    "array in an object": (Holder(LARGE), Holder(OTHER)),
}
DIFFERENT["a budget's number"] = (TokenBudget(16), TokenBudget(17))
DIFFERENT["a number of the user's own budget"] = (Own(3), Own(4))
DIFFERENT["a budget's model"] = (memory(1), memory(2))
DIFFERENT["partial"] = (functools.partial(pow, 2), functools.partial(pow, 3))
DIFFERENT["array of objects"] = (array_of_objects(1, "a"), array_of_objects(1, "b"))
DIFFERENT["object"] = (Holder(3), Holder(4))
DIFFERENT["object in an object"] = (Holder(Holder(3)), Holder(Holder(4)))
DIFFERENT["long text"] = ("a" * 900, "a" * 899 + "b")
DIFFERENT["device"] = (torch.device("cpu"), torch.device("meta"))
DIFFERENT["items of a mapping"] = (collections.OrderedDict(a=1), collections.OrderedDict(a=2))
DIFFERENT["slots of a dataclass"] = (Slotted(1), Slotted(2))


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_settings_of_other_values_are_described_otherwise(one, other):
    assert described(one) != described(other)
    assert described(one) == described(one)
    assert " at 0x" not in described(one) + described(other)


used = Holder(3)
assert used.table
ALIKE = {
    "code, closures and constants": (make(3), make(4)),
    "order of a mapping": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "two copies of an array": (LARGE, LARGE.copy()),
    "list and tuple, as JSON gives them back": ((1, 2), [1, 2]),
    "cached values": (used, Holder(3)),
}
ALIKE["methods"] = (Holder(3).rule, Holder(4).rule)
ALIKE["numpy numbers"] = (np.float64(0.5), 0.5)
ALIKE["a budget's numbers"] = (capped(np.int64(16)), capped(16))
ALIKE["what has neither attributes nor a name"] = (threading.Lock(), threading.Lock())


@pytest.mark.parametrize(("one", "other"), ALIKE.values(), ids=ALIKE)
def test_equal_settings_are_described_alike(one, other):
    assert described(one) == described(other)


def texts():
    """All settings of this file."""
    result = []
    for one, other in [*ALIKE.values(), *DIFFERENT.values()]:
        result += [described(one), described(other)]
    return result


def test_settings_are_described_alike_in_another_process():
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == texts()


def test_objects_that_contain_themselves_end():
    ring = []
    ring.append(ring)
    circle = Holder(None)
    circle.limit = circle
    assert described(ring) == "(^1)"
    assert described(circle) == "Holder(limit=^1)"


def test_an_objects_own_fingerprint_goes_first():
    own = types.SimpleNamespace(fingerprint="mine-3", limit=4)
    assert described([own]) == "(mine-3)"
    assert "limit=4" in described(own, ask=False)


def test_labels_have_one_number_each():
    labels = ["image", None, 3, Colour.RED, Colour.BLUE, FIRST_DAY, ("a", 1)]
    numbers = set(map(number_of, labels))
    assert len(numbers) == len(labels)
    assert number_of(True) == number_of(1.0) == number_of(np.int64(1))


def test_a_tokenizer_is_compared_by_its_file_special_tokens_and_settings():
    used = small_tokenizer()
    used(["a b c d"], truncation=True, max_length=2, padding=True)
    changed = small_tokenizer()
    changed.add_tokens(["w1 w2"])
    cut = small_tokenizer()
    cut.truncation_side = "left"
    assert tokenizer_text(used) == tokenizer_text(small_tokenizer())
    texts_of_others = set(map(tokenizer_text, [used, changed, cut, None, len]))
    assert len(texts_of_others) == 5


BAD_CHECKSUM = "damaged: its content does not match its checksum"
DAMAGED = [
    ({"epoch": 3}, BAD_CHECKSUM),
    ({"more": 1}, BAD_CHECKSUM),
    ({3: 1}, BAD_CHECKSUM),
    ({"identity": 3}, BAD_CHECKSUM),
]
DAMAGED.append(({"version": 1}, f"has version 1, but dynagroup reads {VERSION}"))
DAMAGED.append(({"kind": "Other"}, "of Loader, but got one of 'Other'"))


@pytest.mark.parametrize(("change", "message"), DAMAGED)
def test_what_is_damaged_is_named(change, message):
    with pytest.raises(StateError, match=message):
        opened({**STATE, **change}, "Loader", IDENTITY)


@pytest.mark.parametrize(
    ("identity", "message"),
    [({"seed": 1}, "seed was 1 then, is 0 now"), ({}, "seed was None then, is 0 now")],
)
def test_a_state_of_another_run_says_what_differs(identity, message):
    with pytest.raises(StateError, match=message):
        opened(sealed("Loader", identity, {}), "Loader", IDENTITY)


@pytest.mark.parametrize("states", [None, [], 3, "state"])
def test_what_is_no_state_is_refused(states):
    with pytest.raises(StateError, match="one saved state, or the list of all ranks' states"):
        listed(states)


def test_ranks_agree_but_for_what_each_learned():
    other = {**STATE, "learned": 3, "seal": "x"}
    assert agreed([{**STATE, "learned": 2}, other])["learned"] == 2
    with pytest.raises(StateError, match="after different steps"):
        agreed([STATE, {**STATE, "epoch": 3}])


@given(json_values, st.sampled_from([None, *STATE]))
def test_nothing_but_state_errors_comes_out(value, key):
    state = value if key is None else {**STATE, key: value}
    try:
        assert opened(state, "Loader", IDENTITY) == [state]
    except StateError:
        assert state != STATE
