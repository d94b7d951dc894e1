"""What an online loader saves, and what it checks before it takes anything of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dynagroup.errors import StateError
from dynagroup.online.codec import a_pack, unpack
from dynagroup.online.epoch import FEEDS
from dynagroup.online.feeds.handed_out import HandedOutFeed
from dynagroup.online.feeds.updates import UpdateFeed
from dynagroup.online.requests import UpdateMark
from dynagroup.plan.position import MOST_RANKS
from dynagroup.shapes import IntArray
from dynagroup.validation import (
    Check,
    a_flag,
    a_list,
    a_mapping,
    a_text,
    an_int,
    anything,
    either,
    nothing,
)

__all__ = ["SCHEMA", "checked_states"]


def _a_progress(value: Any, place: str) -> None:
    fields: dict[str, Check] = {
        "kind": a_text(),
        "order": either(nothing(), an_int(0, 1 << 63)),
        "base": either(nothing(), a_pack()),
    }
    a_mapping({**fields, "runner": anything(), "feed": anything()})(value, place)
    feed = FEEDS.get(value["kind"])
    if feed is None:
        raise StateError(f"the state is damaged: {place}['kind'] is {value['kind']!r}, which is no kind of epoch")
    a_mapping(feed.runner.place)(value["runner"], f"{place}['runner']")
    a_mapping(feed.feed.place)(value["feed"], f"{place}['feed']")


A_CURSOR = a_mapping(
    {name: an_int() for name in ("epoch", "update", "samples_used", "samples_seen")}
    | {"current": either(nothing(), an_int())}
)
LENGTHS = a_mapping({"seen": a_mapping(values=a_text()), "fresh": a_mapping(values=a_text()), "steady": a_flag()})
SCHEMA: Mapping[str, Check] = {
    "world_size": an_int(1, MOST_RANKS),
    "rank": an_int(0, MOST_RANKS),
    "epoch": an_int(),
    "progress": either(nothing(), _a_progress),
    "changes": a_list(a_list(an_int(), length=3)),
    "cursor": A_CURSOR,
    "lengths": either(nothing(), LENGTHS),
    "merge_due": a_flag(),
}


def checked_states(
    states: Sequence[Mapping[str, Any]], *, rank: int, size: int, num_in: Callable[[int], int | None], accumulation: int
) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
    """This rank's state, or on another number of ranks the first one, and all that its progress depends on. Changes nothing.

    Args:
        states: each of them whole, and of this run.
        num_in: epoch -> positions of its order, where they are known.
        accumulation: steps of an update, where updates have no set size.

    Raises:
        StateError: a state says what cannot be, or is not this rank's; ranks are missing, or were not saved together.
    """
    for state in states:
        _check_books(state)
        if state["progress"] is not None:
            num_ordered = num_in(state["epoch"])
            _check_positions(state["progress"], num_ordered)
            _check_update(state, num_ordered, accumulation)
    given = states[0]["world_size"]
    ordered = sorted(states, key=lambda state: state["rank"])
    if len(states) > 1:
        _check_together(ordered, given)
    elif given not in (1, size):
        raise StateError(
            f"the state was taken on {given} ranks, this run has {size}: give load_state_dict the list of all ranks' states"
        )
    elif given == size and states[0]["rank"] != rank:
        raise StateError(
            f"this is the state of rank {states[0]['rank']}, and this is rank {rank}: give each rank its own, or the list of all"
        )
    num_ordered = None if ordered[0]["progress"] is None else num_in(ordered[0]["epoch"])
    if num_ordered is not None:
        _check_handed_out(ordered, num_ordered, accumulation)
    if given == size:
        own = ordered[rank] if len(ordered) > 1 else ordered[0]
        return own, [own]
    return ordered[0], ordered


# What was handed out is what was emitted and what is held, over all ranks; every held position lies below where the hand-out
# stands. The emitted samples are counted by themselves (the cursor counts an update when it begins, ``partial`` what each rank
# has emitted of it), so a hand-out that was moved, which would repeat samples or lose them, contradicts the count. One rank's
# state of several knows its own part only: then the hand-out is at least that. Cost: one pass over what is held.
def _check_handed_out(ordered: Sequence[Mapping[str, Any]], num_ordered: int, accumulation: int) -> None:
    first = ordered[0]["progress"]
    if first["kind"] != HandedOutFeed.kind:
        return
    start, stop = first["feed"]["handed_out"]
    count = num_ordered if first["base"] is None else len(unpack(first["base"]))
    held = np.concatenate([positions for state in ordered for positions in _held(state["progress"]["feed"])])
    if (
        any(state["progress"]["feed"]["handed_out"] != [start, stop] for state in ordered)
        or stop != count
        or start > stop
    ):
        said = sorted({tuple(state["progress"]["feed"]["handed_out"]) for state in ordered})
        raise StateError(f"the state is damaged: its ranks stand at {said} of the hand-out, of {count} samples")
    if len(np.unique(held)) < len(held) or (held >= start).any():
        raise StateError(
            f"the state is damaged: {start} samples were handed out, but ranks hold one beyond them, or two ranks the same one"
        )
    if first["base"] is not None and accumulation > 1:
        return  # what was left of an update when the number of ranks changed is part of new ones, which the cursor counts later
    cursor, partial = ordered[0]["cursor"], sum(state["progress"]["runner"]["partial"][1] for state in ordered)
    emitted = cursor["samples_used"] - (num_ordered - count)
    if first["runner"]["offset"]:
        emitted += partial - (cursor["current"] or 0)
    whole = len(ordered) == ordered[0]["world_size"]
    if emitted + len(held) > start or (whole and emitted + len(held) < start):
        raise StateError(
            f"the state is damaged: {start} samples were handed out, but {emitted} were used and {len(held)} are held"
        )


def _held(feed: Mapping[str, Any]) -> list[IntArray]:
    """Positions that a rank was given and has not emitted."""
    return [unpack(feed[name][1]) for name in ("front", "pool")] + [unpack(rest[0]) for rest in feed["rest"]]


def _check_together(ordered: Sequence[Mapping[str, Any]], size: int) -> None:
    ranks = [state["rank"] for state in ordered]
    if len(ordered) != size or ranks != list(range(size)):
        raise StateError(f"states of ranks {ranks} were given; all {size} ranks' states are needed")
    places = {
        (s["world_size"], s["epoch"], s["progress"]["runner"]["steps"] if s["progress"] else None,
         s["cursor"]["samples_seen"], str(s["changes"]))
        for s in ordered
    }  # fmt: skip
    if len(places) > 1:
        raise StateError(
            "the ranks' states were not taken after the same step: (ranks, epoch, step, samples, changes) are "
            f"{sorted(places, key=str)}"
        )


def _check_books(state: Mapping[str, Any]) -> None:
    """Samples are used of an epoch under way or of one that is over, never of one that has yet to begin."""
    cursor, running = state["cursor"], state["progress"] is not None
    used, here = cursor["samples_used"], cursor["epoch"] == state["epoch"]
    if (running and not here) or (used and here and not running) or used > cursor["samples_seen"]:
        raise StateError(
            f"the state is damaged: it counts {used} samples used of epoch {cursor['epoch']} and {cursor['samples_seen']} of the "
            f"run, but its place is {'in' if running else 'the beginning of'} epoch {state['epoch']}"
        )


def _check_update(state: Mapping[str, Any], num_ordered: int | None, accumulation: int) -> None:
    """The next update begins in the epoch that is under way, within its order: finding its place takes a walk up to there."""
    progress = state["progress"]
    if progress["kind"] != UpdateFeed.kind:
        if progress["runner"]["offset"] >= accumulation:
            raise StateError(
                f"the state is damaged: {progress['runner']['offset']} steps of an update are done, which has {accumulation}"
            )
        return
    mark = progress["feed"]["next"]
    if mark is None or len(mark) != len(UpdateMark._fields):
        raise StateError(f"the state is damaged: its next update is {mark!r}")
    epoch, _, used, _, until = mark
    if epoch != state["epoch"] or max(used, until) > (num_ordered or 0):
        raise StateError(
            f"the state is damaged: the next update would begin at sample {max(used, until)} of epoch {epoch}, but epoch "
            f"{state['epoch']} is under way, of {num_ordered} samples"
        )
    done = state["cursor"]["samples_used"]
    if (until or used) != done:
        raise StateError(
            f"the state is damaged: its next update would begin behind sample {until or used}, but {done} samples of the epoch "
            "were used"
        )


def _check_positions(progress: Mapping[str, Any], num_ordered: int | None) -> None:
    """No position beyond the order, none twice."""
    feed = progress["feed"]
    if "front" not in feed or (progress["kind"] == "batches"):
        return
    base = None if progress["base"] is None else unpack(progress["base"])
    count = len(base) if base is not None else num_ordered
    positions = np.concatenate(_held(feed))
    ends = [*positions.tolist(), *(stop - 1 for stop in feed.get("handed_out", ())[1:])]
    beyond = [] if count is None else [position for position in ends if position >= count]
    if base is not None and num_ordered is not None and len(base) and base.max() >= num_ordered:
        beyond.append(int(base.max()))
    if beyond or len(np.unique(positions)) < len(positions):
        raise StateError(f"the state is damaged: positions {beyond[:4]} lie beyond the order, or one is there twice")
