"""The loader for known lengths: every update is planned before its samples are loaded."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from dynagroup.budget.base import Budget
from dynagroup.distributed import World
from dynagroup.errors import AlignmentError, ConfigError, StateError
from dynagroup.fingerprint import described
from dynagroup.lengths import as_streams
from dynagroup.plan.config import PlanConfig
from dynagroup.plan.notices import PlanNotices
from dynagroup.plan.plan import BatchPlan
from dynagroup.plan.planner import Planner
from dynagroup.plan.source import OrderSource
from dynagroup.update.course import Course, Notes
from dynagroup.update.feed import PlannedFeed
from dynagroup.update.free import FreeUpdates
from dynagroup.update.loader import StepLoader
from dynagroup.update.place import PLACE, Place
from dynagroup.update.plans import Updates
from dynagroup.update.preserved import PreservedUpdates
from dynagroup.update.schedule import BatchSizeSchedule
from dynagroup.update.sizes import MOST_EPOCHS, Cursor, Walk
from dynagroup.update.step import Step
from dynagroup.update.weigh import Weigh, weigher
from dynagroup.validation import Check, a_list, an_int, check_flag, check_int, either, nothing

__all__ = ["PlannedDataLoader"]

B = TypeVar("B")
LARGEST_UPDATE = 1 << 40
OURS = ("shuffle", "seed", "samples_per_update", "uneven")
"""Settings of a plan that are arguments of the loader, or follow from it."""


def _change(value: Any, place: str) -> None:
    a_list(an_int(), length=3)(value, place)
    an_int(1)(value[2], f"{place}[2]")


class PlannedDataLoader(StepLoader[B]):
    """Steps planned from known lengths: batches that fit, of similar length, weighed so that gradients add up exactly.

    ``for step in loader`` gives the steps of one epoch, and ``loader.updates()`` the same steps, an update at a time.
    ``len(loader)`` counts steps; the optimizer steps ``loader.num_updates`` times. ``print(loader.plan.report())`` shows the
    epoch before anything runs, ``print(loader.stats)`` what was done.

    Args:
        dataset: anything with ``__getitem__`` and ``__len__``.
        lengths: tokens of each sample, or a dict of named streams.
        budget: what a batch may be; a number means so many tokens.
        samples_per_update: samples of every update over all ranks: an int, or a schedule ``(update, current) -> int``.
            None: free-running, every ``accumulation`` rows of batches as large as fit are an update.
        accumulation: rows an update, only without ``samples_per_update``.
        shuffle: with ``samples_per_update``: draw samples in an order seeded by (seed, epoch); False: in the dataset's order,
            every epoch. Without: draw other batches every epoch; False: the longest first, the same every epoch.
        sampler: of dataset indices, the same on every rank, read once an epoch; only with ``samples_per_update``.
        seed: of order and processing.
        weigh: what a batch weighs against the others; say what the loss is a mean of: "tokens" (labels that a causal model
            predicts), "samples", or a function from a batch to a number.
        drop_last: leave out an epoch's last update where it is smaller than asked; only with ``samples_per_update``.
        plan: further settings of :class:`~dynagroup.LengthAwareBatchSampler`: ``window``, ``oversize``, ``work`` ...
        world: the ranks that share the data; default: all of ``torch.distributed``.
        further: such a setting by its own name (``oversize="error"``, not also in ``plan``), or what the inner ``DataLoader``
            takes: ``collate_fn``, ``num_workers``, ``pin_memory`` and so on.

    Raises:
        ConfigError: an argument is wrong. BudgetError: a sample does not fit and ``oversize="error"``.
        AlignmentError: ranks differ in data, seed or settings, or one of them failed; while iterating.

    >>> from dynagroup.budget.tokens import TokenBudget
    >>> loader = PlannedDataLoader(range(6), [9, 2, 8, 3, 9, 3], TokenBudget(18), samples_per_update=3, weigh="samples")
    >>> [sum(step.samples.local for step in update) for update in loader.updates()]
    [3, 3]
    >>> len(loader), loader.num_updates
    (4, 2)
    """

    KIND = "PlannedDataLoader"

    def __init__(
        self,
        dataset: Any,
        lengths: Any,
        budget: Budget | int,
        *,
        samples_per_update: int | BatchSizeSchedule | None = None,
        accumulation: int = 1,
        shuffle: bool = True,
        sampler: Iterable[int] | None = None,
        seed: int = 0,
        weigh: Weigh = "tokens",
        drop_last: bool = False,
        plan: Mapping[str, Any] | None = None,
        world: World | None = None,
        **further: Any,
    ) -> None:
        super().__init__(dataset, world=world)
        shuffle, drop_last = check_flag("shuffle", shuffle), check_flag("drop_last", drop_last)
        accumulation = check_int("accumulation", accumulation)
        self._weigh: Weigh = weigh
        weigher(weigh)  # refuses what it does not know
        settings, dataloader_kwargs = _sorted_out({} if plan is None else plan, further)
        planner = _planner(dataset, lengths, budget, samples_per_update, shuffle, seed, settings)
        if samples_per_update is None:
            _refuse_without_size(sampler, drop_last)
            self._plan: Updates = FreeUpdates(planner, accumulation=accumulation)
        else:
            if accumulation != 1:
                raise ConfigError(
                    f"`accumulation` ({accumulation}) is whatever the memory needs with `samples_per_update`"
                )
            order = None if sampler is None else OrderSource(sampler, planner.num_samples)
            self._plan = PreservedUpdates(planner, samples_per_update, order, shuffle=shuffle, drop_last=drop_last)
        self._plan.notices = PlanNotices()
        self._feed = PlannedFeed(dataset, planner.config.seed, dataloader_kwargs)
        self._place: Place | None = None
        """Where the steps that were handed out end."""
        self._goes_on = False
        """The next iteration begins at that place."""
        self._under_way: Cursor | None = None
        """Where the update ends that is under way."""
        self._notes = Notes(self.stats, set(planner.oversize.tolist()))
        planner.warn_of_oversize()

    @property
    def budget(self) -> Budget:
        """The budget, with its limits taken from the lengths."""
        return self._plan.planner.budget

    @property
    def num_samples(self) -> int:
        return self._plan.num_samples

    @property
    def num_changes(self) -> int:
        return self._plan.num_changes

    @property
    def cursor(self) -> Cursor:
        place = self._here()
        if place.begun is not None and self._under_way is None:
            self._under_way = next(self._plan.updates(place, 0, self._size)).after
        return place.cursor if place.begun is None or self._under_way is None else self._under_way

    def _here(self) -> Place:
        return self._place or Place(self._plan.start(self._epoch, self._size))

    def _walk(self) -> Walk:
        return self._plan.walk(self._size)

    @property
    def plan(self) -> BatchPlan:
        """The steps of :attr:`epoch` on all ranks, as many as ``len(loader)``: the class and the table of a sampler's plan.

        It holds the whole epoch, also where a part of it was used. Planning takes about twice as long as :func:`len`.

        >>> from dynagroup.budget.tokens import TokenBudget
        >>> print(PlannedDataLoader(range(4), [3, 9, 2, 8], TokenBudget(18)).plan.report().splitlines()[0])
        epoch 0: 4 samples for 1 rank, padded layout
        """
        return self._plan.plan(self.epoch, self._size)

    def __len__(self) -> int:
        """Steps of :attr:`epoch`, exact. The optimizer steps :attr:`num_updates` times, which is known at once.

        The steps of all updates of the epoch are counted, once an epoch: 0.1 to 0.2 ms an update of 64 to 256 samples on one
        rank; on eight 0.05 ms where one row holds an update, else 0.3 to 1.2 ms.
        """
        return self._plan.num_steps(self.epoch, self._size)

    def set_samples_per_update(self, samples: int) -> int:
        """See :meth:`StepLoader.set_samples_per_update`: with ``num_workers=0`` the next update is the first one of the new
        size; otherwise the delay is at most ``num_workers * prefetch_factor`` batches."""
        if not isinstance(self._plan, PreservedUpdates):
            raise ConfigError("set_samples_per_update needs a loader with samples_per_update: this one is free-running")
        asked = self._feed.last if self._live is not None else None
        return self._plan.sizes.change(self.cursor if asked is None else asked.after, samples)

    def skip_to(self, epoch: int, samples_used: int, update: int) -> None:
        if not isinstance(self._plan, PreservedUpdates):
            raise StateError("only updates with samples_per_update continue a fixed-batch run: its samples are known")
        epoch = check_int("epoch", epoch, least=0, most=MOST_EPOCHS)
        samples_used, update = check_int("samples_used", samples_used, least=0), check_int("update", update, least=0)
        cursor = self._plan.sizes.at(epoch, samples_used)
        if cursor is None or cursor.update != update:
            raise StateError(
                f"no update ends after {samples_used} samples and {update} updates of the run, in epoch {epoch}: the other run "
                "had updates of other sizes; give this one the same samples_per_update"
            )
        self._restore(({"changes": [], "past": []}, Place(cursor)))

    # Iterating.

    def _forget(self) -> None:
        self._place, self._goes_on, self._under_way = None, False, None

    def _run(self) -> Iterator[Step[B]]:
        size = self.world.size
        if not self._goes_on:
            self._plan.start(self._epoch, size)  # counts the epochs before by the limits they had
            planner = self._plan.planner.renewed(self.world)
            self._plan.begin(planner, self._epoch, size)
            self._place = Place(self._plan.start(self._epoch, size))
        self._goes_on = False
        place = self._here()
        _compare_ranks(self.world, self._plan, self._identity(), place)
        course: Course[B] = Course(self._feed, self._weigh, self.world, self.budget, self._notes)
        for taken in course.run(self._plan.updates(place, self.world.rank, size), self._epoch):
            self._place, self._under_way = taken.place, taken.ends_at.after
            yield taken.step
        self._plan.end(self._here().cursor)

    # Saving.

    def _identity(self) -> dict[str, Any]:
        return {**self._plan.identity, "budget": self.budget.fingerprint, "weigh": described(self._weigh)}

    def _schema(self) -> Mapping[str, Check]:
        counts = a_list(a_list(an_int(), length=2))
        return {
            **PLACE,
            "changes": a_list(_change),
            "past": counts,
            "order": either(nothing(), an_int(0, (1 << 32) - 1)),
        }

    def _state(self) -> dict[str, Any]:
        place = self._here()
        return {**place.state(), **self._plan.state(place.cursor.epoch, self._size)}

    def _checked(self, states: list[Mapping[str, Any]]) -> tuple[Mapping[str, Any], Place]:
        """One state says everything; of several ranks' states all must say it."""
        state = states[0]
        own = {"learned": None, "seal": None}  # what budgets learn between exchanges may differ by rank
        if any({**other, **own} != {**state, **own} for other in states[1:]):
            raise StateError("the ranks' states differ: they were not taken after the same step")
        place = Place.of(state)
        self._plan.check(state, place)
        if state["order"] != self._plan.state(place.cursor.epoch, self._size)["order"]:
            raise StateError(
                f"`sampler` gives other indices in epoch {place.cursor.epoch} than when the state was taken; "
                "use the same seed and sampler"
            )
        return state, place

    def _restore(self, found: tuple[Mapping[str, Any], Place]) -> None:
        state, place = found
        self._plan.planner = self._plan.planner.rebuilt()
        self._plan.restore(state, place)
        self._place, self._goes_on, self._under_way = place, True, None
        self._epoch = place.cursor.epoch
        self._next = self._epoch + (place.begun is None and self._plan.is_over(place.cursor))


def _sorted_out(plan: Mapping[str, Any], further: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The plan's settings, wherever they were said, and what is left for the ``DataLoader``."""
    if not isinstance(plan, Mapping):
        raise ConfigError(f"`plan` must be a mapping of settings, such as {{'window': 1024}}, but is {plan!r}")
    known = sorted({f.name for f in fields(PlanConfig)} - set(OURS))
    unknown = sorted(set(plan) - set(known), key=str)
    if unknown:
        raise ConfigError(f"`plan` knows the settings {known}, but has {unknown}")
    said = {name: value for name, value in further.items() if name in known}
    twice = sorted(set(said) & set(plan))
    if twice:
        raise ConfigError(f"{twice} are given beside `plan` and in it; say them once")
    if said.get("work", ...) is None:  # what stats.work is after a run too short to tell
        del said["work"]
    return {**plan, **said}, {name: value for name, value in further.items() if name not in known}


def _planner(
    dataset: Any,
    lengths: Any,
    budget: Budget | int,
    samples_per_update: Any,
    shuffle: bool,
    seed: int,
    settings: Mapping[str, Any],
) -> Planner:
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"`dataset` must have __getitem__ and __len__, but is a {type(dataset).__name__}; OnlineDataLoader takes streams"
        )
    drawn = {"seed": check_int("seed", seed, least=0), **settings}
    if samples_per_update is None:
        config = PlanConfig(shuffle=shuffle, **drawn)
    else:
        config = PlanConfig(samples_per_update=LARGEST_UPDATE, **drawn)
    streams = as_streams(lengths)
    count = len(next(iter(streams.values())))
    if count != len(dataset):
        raise ConfigError(f"`lengths` has {count} entries, but the dataset has {len(dataset)} samples")
    return Planner(streams, budget, config)


def _refuse_without_size(sampler: Any, drop_last: bool) -> None:
    if sampler is not None:
        raise ConfigError("`sampler` needs `samples_per_update`: free-running updates group samples across windows")
    if drop_last:
        raise ConfigError("`drop_last` needs `samples_per_update`: without it no update is smaller than asked")


def _compare_ranks(world: World, plan: Updates, identity: Mapping[str, Any], place: Place) -> None:
    """All ranks must be about to plan the same updates of the same samples."""
    if world.size == 1:
        return
    facts = {
        "lengths, budget or settings": repr(identity).encode(),
        "place in the epoch": repr(place).encode(),
    }
    order = plan.order_of(place.cursor.epoch)
    if isinstance(plan, PreservedUpdates) and order is not None:
        facts["order of samples"] = order.tobytes()
        facts["samples_per_update"] = repr([stop for _, stop, _ in plan.sizes.spans(place.cursor)]).encode()
    marks = [zlib.crc32(fact) for fact in facts.values()]
    found = world.all_max([*marks, *(-mark for mark in marks)])
    differing = [name for i, name in enumerate(facts) if found[i] != -found[i + len(marks)]]
    if differing:
        raise AlignmentError(
            f"ranks differ in {', '.join(differing)} at the start of epoch {place.cursor.epoch}: "
            "seed samplers and schedules alike on every rank, and load the same state everywhere"
        )
