"""Where a planned run stands, at any step: a few integers, and how they are saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dynagroup.plan.position import POSITION, Position
from dynagroup.update.sizes import MOST_EPOCHS, Cursor
from dynagroup.validation import Check, a_mapping, a_number, an_int, either, nothing

__all__ = ["PLACE", "Begun", "Place"]


@dataclass(frozen=True, slots=True)
class Begun:
    """What was handed out of the update under way, on all ranks.

    Args:
        position: where the rows of its window stand.
        rows: steps taken.
        samples: samples in them.
        weight: what they weigh.
    """

    position: Position
    rows: int
    samples: int
    weight: float


@dataclass(frozen=True, slots=True)
class Place:
    """Behind ``cursor``'s update, and behind what was ``begun`` of the next one. The same on every rank."""

    cursor: Cursor
    begun: Begun | None = None

    def state(self) -> dict[str, Any]:
        """JSON-able, see :data:`PLACE`."""
        return {"cursor": asdict(self.cursor), "begun": None if self.begun is None else asdict(self.begun)}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Place:
        """What :meth:`state` gave, also after JSON; checked before by :data:`PLACE`."""
        cursor, begun = dict(state["cursor"]), state["begun"]
        cursor["position"] = None if cursor["position"] is None else Position.of(cursor["position"])
        if begun is None:
            return cls(Cursor(**cursor))
        return cls(Cursor(**cursor), Begun(**{**begun, "position": Position.of(begun["position"])}))


CURSOR = a_mapping(
    {
        "epoch": an_int(0, MOST_EPOCHS),
        "update": an_int(),
        "samples_used": an_int(),
        "samples_seen": an_int(),
        "current": either(nothing(), an_int(1)),
        "position": either(nothing(), a_mapping(POSITION)),
    }
)
BEGUN = a_mapping({"position": a_mapping(POSITION), "rows": an_int(1), "samples": an_int(), "weight": a_number(0.0)})
PLACE: Mapping[str, Check] = {"cursor": CURSOR, "begun": either(nothing(), BEGUN)}
"""What the fields of a saved place must be."""
