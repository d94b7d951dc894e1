"""The format of every saved state: its kind, a version, the run's data and settings, and a checksum of everything."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dynagroup.errors import StateError
from dynagroup.fingerprint import hashed

VERSION = 7
ENVELOPE = {"kind", "version", "identity", "seal"}  # fields that every state has


def sealed(kind: str, identity: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state that can be saved as JSON: ``fields``, their ``kind`` (a class name), and the run's ``identity``.

    >>> state = sealed("Loader", {"seed": 0}, {"epoch": 2})
    >>> opened(state, "Loader", {"seed": 0})[0]["epoch"]
    2
    """
    state = {"kind": kind, "version": VERSION, "identity": dict(identity), **fields}
    return {**state, "seal": seal_of(state)}


def listed(states: Any) -> list[Any]:
    """Returns one state, or a list of all ranks' states, as a list. StateError: ``states`` is neither."""
    if isinstance(states, Mapping):
        return [states]
    if not isinstance(states, (list, tuple)) or not states:
        raise StateError(
            f"expected one saved state, or the list of all ranks' states, but got {states!r:.80}"
        )
    return list(states)


def opened(states: Any, kind: str, identity: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Checks one state, or all ranks' states, made by :func:`sealed`; returns a list of them. Raises StateError if one is
    damaged, or has another kind, version or run; the message gives saved and current values."""
    opened_states = listed(states)
    for state in opened_states:
        _check_state(state, kind, identity)
    return opened_states


def _check_state(state: Any, kind: str, identity: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping) or not state.keys() >= ENVELOPE:
        raise StateError(f"expected a saved state of {kind}, but got {state!r:.80}")
    if state["kind"] != kind:
        raise StateError(
            f"expected a saved state of {kind}, but got one of {state['kind']!r}; load the right one"
        )
    if state["version"] != VERSION:
        raise StateError(
            f"the state has version {state['version']!r}, but dynagroup reads {VERSION}; load another"
        )
    if state["seal"] != seal_of(state):
        raise StateError(
            "the state is damaged: its content does not match its checksum; load an earlier one"
        )
    saved = state["identity"]
    missing = object()
    differences = []
    for name in sorted({*saved, *identity}, key=str):
        if saved.get(name, missing) != identity.get(name, missing):
            differences.append(
                f"{name} was {saved.get(name)!r} then, is {identity.get(name)!r} now"
            )
    if differences:
        raise StateError(
            f"the state was saved by a run with other data or settings: {'; '.join(differences)}"
        )


def agreed(states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns the first rank's state. StateError: the states differ in more than what ranks learned, so in their steps."""
    for state in states[1:]:
        if _common(state) != _common(states[0]):
            raise StateError(
                "the ranks saved their states after different steps; load states of one and the same step"
            )
    return states[0]


def _common(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in ("learned", "seal")}


def seal_of(state: Mapping[str, Any]) -> str:
    """Returns a checksum of a state. Values that JSON cannot store (such as a dataset's own state) enter by their type.
    The checksum detects states that were cut off, mixed or edited by accident, not forged ones."""
    content = {**state, "seal": None}
    try:
        text = json.dumps(content, sort_keys=True, default=lambda value: type(value).__name__)
    except (TypeError, ValueError, RecursionError):  # keys of several types, or a list in itself
        return "none"
    return hashed(text)
