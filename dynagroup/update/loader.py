"""The contract of every loader of steps, on which training loops, adapters and the laws rely.

Two classes keep it. They differ in where an epoch's steps come from, and in what a place in it is. The rest is here.
"""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, ClassVar, Generic

import numpy as np
import torch
from torch.utils.data import DataLoader

from dynagroup.budget.base import Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.distributed import World, current_world, rank_and_size
from dynagroup.errors import ConfigError, StateError
from dynagroup.plan.cursor import Cursor
from dynagroup.shapes import Streams
from dynagroup.state import listed, opened, sealed
from dynagroup.update.schedule import UpdateSizes, Walk
from dynagroup.update.step import B, LoaderStats, Step
from dynagroup.validation import check_flag, check_int


class StepLoader(ABC, Generic[B]):
    """Yields the steps of one epoch after another: ``for step in loader``, or per update: ``loader.updates()``.

    Every rank gets the same number of steps. Without :meth:`set_epoch` each iteration is the next epoch.
    :meth:`state_dict` saves a place after any step; :meth:`load_state_dict` continues there with exactly what remained.
    A subclass writes the abstract methods.

    Attributes:
        dataset: the dataset as it was given.
        stats: counts of what this rank has done since the loader was made.
    """

    KIND: ClassVar[str]  # name of the class in saved states
    sizes: UpdateSizes | None = None  # samples of each update, if `samples_per_update` is set

    def __init__(self, dataset: Any, *, world: World | None) -> None:
        self.dataset = dataset
        if world is not None and not all(hasattr(world, name) for name in ("rank", "size", "all_max", "all_sum")):
            raise ConfigError(f"`world` must be a World, such as DistributedWorld(group), or None, but is {world!r}")
        self.stats = LoaderStats()
        self._world = world
        self._epoch = self._next = 0  # the running, last or chosen epoch; the epoch of the next iteration
        self._begun = False  # whether `_epoch` was begun here; then any epoch that is chosen starts from its beginning
        self._live: Iterator[Step[B]] | None = None  # the steps of the running iteration

    @property
    @abstractmethod
    def budget(self) -> Budget:
        """The limit of a batch."""

    @property
    @abstractmethod
    def num_samples(self) -> int | None:
        """Samples that an epoch draws over all ranks; None for a stream."""

    @property
    @abstractmethod
    def cursor(self) -> Cursor:
        """The place after all updates that were handed out, including the current one."""

    @abstractmethod
    def examples(self) -> tuple[Streams, Callable[[int], Any], Callable[..., Any]]:
        """Three things: lengths of some samples; a function from a place among them to the sample; and a function from
        samples to a batch, which it fills to a given shape if there are few shapes."""

    @abstractmethod
    def _run(self) -> Iterator[Step[B]]:
        """Yield the steps of epoch ``self._epoch`` from the current place on; :attr:`cursor` follows."""

    @abstractmethod
    def _forget(self) -> None:
        """Go to the beginning of epoch ``self._next``, and drop the place that was reached or loaded."""

    @abstractmethod
    def _asked(self) -> Cursor:
        """The place after the updates that workers were asked for."""

    @abstractmethod
    def _walk(self) -> Walk:
        """The sequence of updates of a run. ConfigError: it is not known beforehand."""

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """Data and settings that a place depends on, besides ranks: JSON-able. What was learned is no part of it."""

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """The place of this rank, JSON-able."""

    @abstractmethod
    def _checked(self, states: list[Mapping[str, Any]]) -> Any:
        """What to go on from, of whole states of this run; changes nothing. StateError: they do not belong together."""

    @abstractmethod
    def _restore(self, found: Any) -> None:
        """Go on from what :meth:`_checked` found; sets ``self._epoch`` and ``self._next``. What fails changes nothing."""

    @property
    def world(self) -> World:
        """The ranks that share the data; looked up when first needed, which is collective."""
        if self._world is None:
            self._world = current_world()
        return self._world

    def _rank_and_size(self) -> tuple[int, int]:
        """Like :attr:`world`, but without a collective call, so that one rank alone may print a length or a plan."""
        return (self._world.rank, self._world.size) if self._world is not None else rank_and_size()

    @property
    def epoch(self) -> int:
        """The epoch that is running; between iterations, the one that the next iteration is in."""
        return self._next if self._live is None else self._epoch

    def __getstate__(self) -> dict[str, Any]:
        if self._live is not None:
            way_out = "pickle or copy it between epochs, or save its state_dict()"
            raise StateError(f"this loader is being iterated: {way_out}")
        return vars(self)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. Choosing the current one again keeps even a loaded place."""
        self._next = check_int("epoch", epoch, least=0)
        if self._live is None:
            self._choose()

    def restart_epoch(self) -> None:
        """Forget which part of the epoch was used: the next iteration starts at the beginning of the epoch."""
        self._next = self.epoch
        if self._live is None:
            self._choose(anew=True)

    def _choose(self, *, anew: bool = False) -> None:
        if anew or self._begun or self._next != self._epoch:
            self._forget()
            self._epoch, self._begun = self._next, False

    @property
    def num_changes(self) -> int:
        """Grows when :attr:`num_updates` may have changed in the run: by a new size, or because a budget learned."""
        return 0 if self.sizes is None else len(self.sizes.changes)

    def set_samples_per_update(self, samples: int) -> int:
        """Change the size of updates from now on. Call it on every rank after the same step. The state includes it.

        Updates that workers were already asked for keep their size: at most ``num_workers * prefetch_factor`` batches
        of a planned loader, or as many updates of an online one.

        Returns:
            The number (from 0) of the first update that holds ``samples`` samples.
        """
        if self.sizes is None:
            raise ConfigError("set_samples_per_update needs a loader with samples_per_update: this one is free-running")
        return self.sizes.change(self._asked(), samples)

    def __iter__(self) -> Iterator[Step[B]]:
        self._stop()
        self._choose()
        self._next, self._begun = self._epoch + 1, True
        live = self._live = self._run()
        try:
            for step in live:
                yield step
                if self._live is not live:
                    raise ConfigError("this iteration of the loader has ended: another iteration has begun")
        finally:
            self._stop(live)

    def _stop(self, live: Iterator[Step[B]] | None = None) -> None:
        """End this iteration; by default the running one, if there is one."""
        live = live or self._live
        if self._live is live:
            self._live = None
            if self._next != self._epoch + 1:
                self._choose()  # another epoch was chosen while it ran
        close = getattr(live, "close", None)
        if close is not None:
            close()

    def updates(self) -> Iterator[list[Step[B]]]:
        """The same steps as iteration gives, in one list for each update."""
        update: list[Step[B]] = []
        with closing(iter(self)) as steps:  # pyright: ignore[reportArgumentType] - a generator
            for step in steps:
                update.append(step)
                if step.ends_update:
                    yield update
                    update = []

    @property
    def num_updates(self) -> int:
        """Number of updates of :attr:`epoch`, exact unless their size changes. ConfigError: not known beforehand."""
        return self._walk().num_updates(self.epoch)

    def updates_in(self, epochs: float) -> int:
        """Updates from the start of training until this many epochs are used; the last may be used in part."""
        whole, walk = max(math.ceil(epochs), 1) - 1, self._walk()
        last = walk.num_updates(whole)  # as Trainers count: 2.1 epochs of 10 are 21; 20 + ceil((2.1 - 2) * 10) is 22
        return walk.start(whole).update + math.ceil(epochs * last) - whole * last

    def samples_after(self, updates: int) -> int:
        """Samples that training has used, over all ranks, after this many updates since its start."""
        updates = check_int("updates", updates, least=0)
        return self._walk().after(updates).samples_seen

    def state_dict(self) -> dict[str, Any]:
        """State of this rank, JSON-able. A step that the loop received counts as used. Save every rank's."""
        return sealed(self.KIND, self._identity(), {"learned": LearningBudget.saved(self.budget), **self._state()})

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue where states were saved, on any number of ranks: exactly what remained of the epoch comes next.

        Args:
            state_dict: this rank's state, or the list of all ranks' states.

        Raises:
            StateError: a state is damaged or of other data or settings, or ranks are missing. Nothing has changed then.
        """
        states, (rank, size) = listed(state_dict), self._rank_and_size()
        found = self._checked(opened(states, self.KIND, self._identity()))
        with LearningBudget.taken_up(self.budget, states[rank if len(states) == size else 0]):
            self._stop()
            self._restore(found)
        self._begun = False


def check_updates(samples_per_update: Any, accumulation: int, **of_set_sizes: bool) -> int:
    """``accumulation``. ConfigError: ``samples_per_update`` excludes it, or a setting needs that and it is missing."""
    accumulation = check_int("accumulation", accumulation)
    for name, given in of_set_sizes.items():
        if check_flag(name, given) and samples_per_update is None:
            raise ConfigError(f"`{name}` needs `samples_per_update`: without it the size of updates is not fixed")
    if samples_per_update is not None and accumulation != 1:
        both = f"`accumulation` ({accumulation}) and `samples_per_update`"
        raise ConfigError(f"{both} exclude each other: an update has as many steps as its samples need")
    return accumulation


ENDED_EARLY = "the dataset, `collate_fn` or `weigh` raised StopIteration while samples were left"


class Inner:
    """The user's settings of a ``DataLoader``, and the DataLoader itself, made on first use and again in a copy."""

    def __init__(self, kwargs: Mapping[str, Any]) -> None:
        if "batch_size" in kwargs:
            raise ConfigError("`batch_size` is not an argument of this loader: the budget decides the size of a batch")
        if kwargs.get("in_order") is False:
            raise ConfigError("`in_order=False` has no effect: batches are used in the order of requests")
        # Its own, unless there is one: a DataLoader would draw its workers' seed from torch's, and shift that on resuming.
        self._generator = torch.Generator()
        self.kwargs = {**checked_kwargs(kwargs), "generator": kwargs.get("generator") or self._generator}
        self.loader: DataLoader[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "loader": None}

    def seed(self, *place: int) -> None:
        """Seed the random numbers of workers, unless the user gave a generator."""
        self._generator.manual_seed(seed_of(*place))


def seed_of(*place: int) -> int:
    return int(np.random.SeedSequence(place).generate_state(1)[0])


def checked_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Check the arguments of a ``DataLoader`` that do not say what a batch is. ConfigError: torch refuses them for an
    empty DataLoader, which starts no worker; or ``num_workers`` is no count (with an infinite one it would wait)."""
    check_int("num_workers", kwargs.get("num_workers", 0), least=0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the real DataLoader will warn
            DataLoader([], batch_sampler=[], **kwargs)  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"torch's DataLoader refuses {kwargs!r:.300}: {error}") from error
    return dict(kwargs)
