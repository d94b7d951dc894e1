"""One envelope for every saved state: what is damaged, mixed or of another run is refused, in words that say what."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynagroup.errors import StateError
from dynagroup.state import agreed, listed, opened, sealed

IDENTITY = {"seed": 0}
STATE = sealed("Loader", IDENTITY, {"epoch": 2, "segments": [[2, 3]], "order": None})


def test_a_whole_state_of_this_run_passes_also_after_json():
    assert opened(STATE, "Loader", IDENTITY) == [STATE]
    assert opened([STATE, json.loads(json.dumps(STATE))], "Loader", IDENTITY) == [STATE, STATE]


@pytest.mark.parametrize(("change", "said"), [
    ({"epoch": 3}, "damaged: it is not what was saved"),
    ({"more": 1}, "its seal differs"),
    ({3: 1}, "its seal differs"),
    ({"identity": 3}, "its seal differs"),
    ({"version": 1}, "has version 1, this dynagroup reads version 3"),
    ({"kind": "Other"}, "a state of 'Other', not of Loader"),
])  # fmt: skip
def test_what_is_damaged_is_named(change, said):
    with pytest.raises(StateError, match=said):
        opened({**STATE, **change}, "Loader", IDENTITY)


def test_a_state_of_another_run_says_what_differs():
    for identity, said in (({"seed": 1}, "seed: 1 then, 0 now"), ({}, "seed: None then, 0 now")):
        with pytest.raises(StateError, match=f"another run; {said}"):
            opened(sealed("Loader", identity, {}), "Loader", IDENTITY)


def test_states_of_several_ranks_must_agree_but_for_what_each_learned():
    for no_states in (None, [], 3, "state"):
        with pytest.raises(StateError, match="a state, or the list of all ranks' states"):
            listed(no_states)
    assert agreed([{**STATE, "learned": 2}, {**STATE, "learned": 3, "seal": "x"}])["learned"] == 2
    with pytest.raises(StateError, match="not saved after the same step"):
        agreed([STATE, {**STATE, "epoch": 3}])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(json_values, st.sampled_from([None, *STATE]))
def test_nothing_but_state_errors_comes_out(value, key):
    state = value if key is None else {**STATE, key: value}
    try:
        assert opened(state, "Loader", IDENTITY) == [state]
    except StateError:
        assert state != STATE
