"""How a loader is saved and restored: one envelope, checked whole before anything changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dynagroup.budget.base import Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.errors import StateError
from dynagroup.state import check_seal, check_state, seal_of
from dynagroup.validation import Check, a_text, anything

__all__ = ["Saved"]

STATE_VERSION = 1


# A state is an envelope (kind, version, identity of data and settings, what the budget has learned, a seal) around a place.
# Loading takes over what was learned first, because fingerprints show it, then compares and checks every part of every state,
# and only then changes the loader; whatever is refused on the way puts back what was learned. Cost: one visit of the state.
class Saved(ABC):
    """What is the same about saving every loader. A subclass says what its place is."""

    KIND: ClassVar[str]
    """The class's name in states."""

    @property
    @abstractmethod
    def budget(self) -> Budget:
        """What a batch may be."""

    @abstractmethod
    def _rank_and_size(self) -> tuple[int, int]:
        """This rank and how many there are; asking is not collective."""

    @abstractmethod
    def _stop(self) -> None:
        """End the iteration that runs, if one does."""

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """Data and settings that a place depends on, besides ranks: JSON-able. With what the budget has learned by now."""

    @abstractmethod
    def _schema(self) -> Mapping[str, Check]:
        """What the fields of :meth:`_state` must be, see :mod:`dynagroup.validation`."""

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """Where this rank stands, JSON-able."""

    @abstractmethod
    def _checked(self, states: list[Mapping[str, Any]]) -> Any:
        """What to go on from, out of states that are whole and of this run; changes nothing.

        Raises:
            StateError: ranks are missing, the states do not belong together, or say what cannot be.
        """

    @abstractmethod
    def _restore(self, found: Any) -> None:
        """Go on from what :meth:`_checked` found; sets ``self._epoch`` and ``self._next``. Cannot fail."""

    def state_dict(self) -> dict[str, Any]:
        """Where this rank stands: JSON-able. Steps count as used once the loop has received them. Save every rank's."""
        learned = LearningBudget.saved(self.budget)
        own = {"kind": self.KIND, "version": STATE_VERSION, "identity": self._identity(), "learned": learned}
        state = {**own, **self._state(), "seal": ""}
        return {**state, "seal": seal_of(state)}

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on where states were taken, on any number of ranks: exactly what remained of the epoch comes next.

        Args:
            state_dict: this rank's state, or the list of all ranks' states.

        Raises:
            StateError: a state is damaged, of other data or settings, or ranks are missing. Nothing has changed then.
        """
        states = [state_dict] if isinstance(state_dict, Mapping) else state_dict
        if not isinstance(states, (list, tuple)) or not states:
            raise StateError(
                f"a state, or the list of all ranks' states, was expected, but {type(states).__name__} was given"
            )
        rank, size = self._rank_and_size()
        with LearningBudget.of_state(self.budget, states[rank if len(states) == size else 0]):
            identity, schema = self._identity(), {**self._schema(), "learned": anything(), "seal": a_text()}
            for state in states:
                check_state(state, self.KIND, STATE_VERSION, schema, identity)
                check_seal(state)
            found = self._checked(list(states))
        self._stop()
        self._restore(found)
