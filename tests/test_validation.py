"""Arguments and saved states are checked in one place; every refusal names the value and changes nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynagroup.errors import ConfigError, StateError
from dynagroup.validation import (
    a_list,
    a_mapping,
    a_text,
    an_int,
    check_choice,
    check_int,
    check_number,
    either,
    nothing,
)

SCHEMA = {"epoch": an_int(), "segments": a_list(a_list(an_int(), length=2)), "order": either(nothing(), a_text())}
STATE = {"epoch": 2, "segments": [[2, 3]], "order": None}


def checked(state):
    a_mapping(SCHEMA)(state, "state")
    return state


@pytest.mark.parametrize("value", [True, 0, 1.0, "8", None, 1 << 63])
def test_an_int_is_an_int(value):
    with pytest.raises(ConfigError, match=r"`window` must be an int of at (least|most) .*, but is "):
        check_int("window", value)


def test_numpy_integers_become_plain_ones_so_that_states_can_be_saved():
    assert json.dumps(check_int("seed", np.int32(7), least=0)) == "7"


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "1", 1.5])
def test_a_share_is_within_its_bounds(value):
    with pytest.raises(ConfigError, match="`headroom` must be"):
        check_number("headroom", value, most=1.0)


def test_a_choice_is_one_of_its_choices():
    with pytest.raises(ConfigError, match="`uneven` must be one of 'repeat', 'drop', but is 'stop'"):
        check_choice("uneven", "stop", ("repeat", "drop"))
    with pytest.raises(ConfigError, match="must be one of"):
        check_choice("flag", 1, (True, None))


def test_a_whole_state_of_this_run_passes():
    assert checked(STATE) is STATE
    assert checked(json.loads(json.dumps(STATE))) == STATE


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"epoch": -1}, "epoch"),
        ({"epoch": 1.0}, "epoch"),
        ({"epoch": True}, "epoch"),
        ({"epoch": 10**30}, "epoch"),
        ({"segments": [[1]]}, r"segments'?\]?\[0\]"),
        ({"segments": 3}, "segments"),
        ({"order": 4}, "order"),
        ({"more": 1}, "more"),
    ],
)
def test_what_is_damaged_or_foreign_is_named(change, said):
    with pytest.raises(StateError, match=said):
        checked({**STATE, **change})


@pytest.mark.parametrize("key", list(STATE))
def test_what_is_missing_is_named(key):
    with pytest.raises(StateError, match=key):
        checked({name: value for name, value in STATE.items() if name != key})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(json_values, st.sampled_from([None, *STATE]))
def test_nothing_but_state_errors_comes_out(value, key):
    state = value if key is None else {**STATE, key: value}
    try:
        checked(state)
    except StateError:
        return
    assert a_mapping()(state, "state") is None
