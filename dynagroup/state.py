"""The common form of every saved state: kind, version, identity of the run, and a checksum of all of it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dynagroup.errors import StateError
from dynagroup.fingerprint import hashed

VERSION = 3


def sealed(kind: str, identity: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """A state to save: ``fields``, the class that saves them, and the data and settings that they depend on. JSON-able.

    >>> state = sealed("Loader", {"seed": 0}, {"epoch": 2})
    >>> opened(state, "Loader", {"seed": 0})[0]["epoch"]
    2
    """
    state = {"kind": kind, "version": VERSION, "identity": dict(identity), **fields}
    return {**state, "seal": seal_of(state)}


def listed(states: Any) -> list[Any]:
    """Make one state, or the list of all ranks' states, a list. StateError: it is anything else."""
    found = [states] if isinstance(states, Mapping) else states
    if not isinstance(found, (list, tuple)) or not found:
        raise StateError(f"a state, or the list of all ranks' states, was expected, but {states!r:.80} was given")
    return list(found)


def opened(states: Any, kind: str, identity: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Check one state, or all ranks' states, each made by :func:`sealed`, and return their fields. Changes nothing.

    Raises:
        StateError: one is damaged, or of another kind, version or run; the message says what differs, then and now.
    """
    found = listed(states)
    for state in found:
        if not isinstance(state, Mapping) or not state.keys() >= {"kind", "version", "identity", "seal"}:
            raise StateError(f"this is no state of {kind}: {state!r:.80}")
        if state["kind"] != kind:
            raise StateError(f"this is a state of {state['kind']!r}, not of {kind}")
        if state["version"] != VERSION:
            raise StateError(f"the state has version {state['version']!r}, this dynagroup reads version {VERSION}")
        if state["seal"] != seal_of(state):
            told = "the state is damaged: it is not what was saved, its seal differs"
            raise StateError(f"{told}; load an earlier checkpoint")
        theirs, missing = state["identity"], object()
        names = [k for k in {*theirs, *identity} if theirs.get(k, missing) != identity.get(k, missing)]
        if names:
            told = [f"{name}: {theirs.get(name)!r} then, {identity.get(name)!r} now" for name in sorted(names, key=str)]
            raise StateError(f"the state belongs to another run; {'; '.join(told)}")
    return found


def agreed(states: Sequence[Mapping[str, Any]], *, besides: Sequence[str] = ("learned",)) -> Mapping[str, Any]:
    """The state of the first rank, if the states of all ranks are equal, apart from the fields in ``besides``.

    Raises:
        StateError: they were not taken after the same step.
    """
    own = dict.fromkeys((*besides, "seal"))
    if any({**other, **own} != {**states[0], **own} for other in states[1:]):
        raise StateError("the ranks' states differ: they were not saved after the same step")
    return states[0]


def seal_of(state: Mapping[str, Any]) -> str:
    """A hash of all that a state holds. Values that are not JSON (such as a dataset's own state) count by their type.

    It detects a state that was cut, mixed from two, or edited. It does not prove that a state is genuine.
    """
    try:
        return hashed(json.dumps({**state, "seal": None}, sort_keys=True, default=lambda value: type(value).__name__))
    except (TypeError, ValueError, RecursionError):  # keys of several types, a list that holds itself
        return "none"
