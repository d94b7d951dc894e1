"""The base class of all loaders. Training loops, integrations and tests use only its methods. The two subclasses
determine where an epoch's steps come from, and what their saved states contain."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from functools import partial
from inspect import signature
from typing import Any, ClassVar, Generic, TypeAlias

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
from dynagroup.update.loss_weight import Weigh
from dynagroup.update.schedule import UpdateSizes, Walk
from dynagroup.update.step import B, LoaderStats, Step
from dynagroup.validation import (
    check_flag,
    check_function,
    check_identity,
    check_int,
    check_names,
    check_number,
    explained,
    sendable,
    warn_user,
)

State: TypeAlias = Mapping[str, Any]  # for JSON


class StepLoader(ABC, Generic[B]):
    """Yields steps, epoch after epoch: singly (``for step in loader``) or as lists per update (``loader.updates()``).

    Every rank gets the same number of steps. Each iteration is one epoch, the next one unless :meth:`set_epoch`
    chooses; one that is left before its first update was used is none, and :meth:`peek` shows a step.
    :meth:`state_dict` can be called after any step; :meth:`load_state_dict` resumes with what remained.

    Attributes:
        dataset: the dataset, as given.
        stats: :class:`LoaderStats`, counts of this rank since the loader was made.
    """

    KIND: ClassVar[str]  # the class's name in saved states
    sizes: UpdateSizes | None = None  # sizes of all updates, if `samples_per_update` is set
    weigh: Weigh  # the weight of a batch, as given

    def __init__(self, dataset: Any, *, world: World | None, identity: object = None) -> None:
        self.dataset = dataset
        self._users_identity = check_identity(identity)
        if world is not None and not isinstance(world, World):
            raise ConfigError(
                f"`world` must be a World, such as DistributedWorld(group), or None, but is {world!r}"
            )
        self.stats = LoaderStats()
        self._world = world
        self._epoch = 0  # epoch of the running, last or chosen iteration
        self._next = 0  # epoch of the next iteration
        # True: `_epoch` began in this loader, so choosing any epoch starts at its beginning
        self._begun = False
        self._live: Generator[Step[B]] | None = None  # steps of the running iteration
        # Updates of the running or last iteration after which the loop went on; None: it has ended, or none has begun.
        self._num_used: int | None = None
        # Where it began, as long as none of its updates was used.
        self._began_at: Any = None

    def __repr__(self) -> str:
        place = self.cursor
        num_samples = "a stream" if self.num_samples is None else f"{self.num_samples:,} samples"
        if self.sizes is None:
            updates = "batches as large as the budget allows"
        elif self.sizes.is_constant:
            updates = f"updates of {self.sizes.schedule:,}"
        else:
            updates = "updates by a schedule"
        rank, world_size = self._rank_and_size()
        return (
            f"{type(self).__name__}({num_samples}, {self.budget!r}, {updates})\n"
            f"  rank {rank} of {world_size}, epoch {self.epoch}, after {place.update:,} updates of the run"
        )

    @property
    @abstractmethod
    def budget(self) -> Budget:
        """The limit of a batch."""

    @property
    @abstractmethod
    def num_samples(self) -> int | None:
        """Samples in one epoch, over all ranks; None for an iterable dataset."""

    @property
    @abstractmethod
    def cursor(self) -> Cursor:
        """The point in the run after all yielded updates, including the current one."""

    @abstractmethod
    def examples(self) -> tuple[Streams, Callable[[int], object], Callable[..., Any]]:
        """Returns what is needed to try batches: lengths of some samples; a function that reads the sample with a
        number in these lengths; and a function from samples (and optionally a shape to pad to) to a batch."""

    def kind_of_example(self, number: int, sample: object) -> Any:
        """Returns the label of a sample of :meth:`examples`; samples with different labels share no batch."""
        return None

    @abstractmethod
    def _run(self, send: Callable[[B], Any] | None) -> Generator[Step[Any]]:
        """Yields the rest of epoch ``self._epoch``, each batch passed through ``send``, and updates :attr:`cursor`."""

    @abstractmethod
    def _forget(self) -> None:
        """Moves to the beginning of epoch ``self._next``, and drops any loaded resume point."""

    @abstractmethod
    def _asked(self) -> Cursor:
        """Returns the point in the run after the updates that workers were asked for."""

    @abstractmethod
    def _walk(self) -> Walk:
        """Returns all updates of the run, in order. ConfigError: they are not known in advance."""

    @abstractmethod
    def _identity(self) -> dict[str, object]:
        """Returns data and settings that a resume point depends on, without ranks and learned limits, as JSON values."""

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """Returns the point from which this rank can resume, as JSON values."""

    @abstractmethod
    def _checked(self, states: list[State]) -> Any:
        """Checks saved states; returns what :meth:`_restore` needs, and changes nothing. StateError: they do not match."""

    @abstractmethod
    def _restore(self, checked: Any, /) -> None:
        """Resumes from the result of :meth:`_checked`; sets ``_epoch`` and ``_next``. An error changes nothing."""

    @abstractmethod
    def _place_to_begin(self) -> Any:
        """Returns where the next iteration begins, for :meth:`_go_back`."""

    @abstractmethod
    def _go_back(self, place: Any, /) -> None:
        """Moves back to where the last iteration began."""

    @property
    def world(self) -> World:
        """The ranks that share the data; the first use is a collective call, so all ranks must make it."""
        if self._world is None:
            self._world = current_world()
        return self._world

    def _rank_and_size(self) -> tuple[int, int]:
        """Returns the rank and number of ranks, like :attr:`world`, but needs no call on the other ranks."""
        if self._world is None:
            return rank_and_size()
        return self._world.rank, self._world.size

    @property
    def epoch(self) -> int:
        """The running epoch; between iterations, the epoch of the next iteration."""
        return self._next if self._live is None else self._epoch

    def __getstate__(self) -> dict[str, object]:
        if self._live is not None:
            raise StateError(
                "a loader cannot be pickled or copied while it is iterated; do so between epochs, or "
                "save its state_dict()"
            )
        return vars(self)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next iteration. Choosing the current epoch again keeps a loaded resume point."""
        self._next = check_int("epoch", epoch, least=0)
        if self._live is None:
            self._choose()
            self._num_used = None

    def restart_epoch(self) -> None:
        """Makes the next iteration start at the beginning of the current epoch."""
        self._next = self.epoch
        self._began_at = None
        if self._live is None:
            self._choose(anew=True)

    def _choose(self, *, anew: bool = False) -> None:
        if not (anew or self._begun or self._next != self._epoch):
            return
        if self._began_at is not None and self._next == self._epoch:
            self._go_back(self._began_at)
        else:
            self._forget()
            self._epoch = self._next
        self._begun = False

    def peek(self) -> Step[B]:
        """Returns the first step of the next iteration, to look at. That iteration yields it again, and a saved state does
        not count it. Call it on every rank, between iterations."""
        if self._live is not None:
            raise ConfigError(
                "peek() shows the first step of the next iteration; call it while none is running"
            )
        stats = self.stats.copy()
        with closing(iter(self)) as steps:
            first = next(steps, None)
        self._choose()
        for count in fields(stats):
            setattr(self.stats, count.name, getattr(stats, count.name))
        if first is None:
            raise ConfigError("peek() needs a loader with at least one step, but this one has none")
        return first

    @property
    def num_changes(self) -> int:
        """Number that grows when :attr:`num_updates` may have changed: by a new update size, or a learned limit."""
        return 0 if self.sizes is None else len(self.sizes.changes)

    def set_samples_per_update(self, samples: int) -> int:
        """Changes the size of all later updates. Call it on every rank after the same step; saved states include it.

        Updates that workers are already loading keep their size: at most ``num_workers * prefetch_factor`` batches of a
        planned loader, or as many updates of an online loader.

        Returns:
            The number (from 0) of the first update with ``samples`` samples.
        """
        if self.sizes is None:
            raise ConfigError(
                "set_samples_per_update needs a loader that was made with `samples_per_update`"
            )
        return self.sizes.change(self._asked(), samples)

    def __iter__(self) -> Generator[Step[B]]:
        return self.mapped(None)

    def mapped(self, fn: Callable[[B], Any] | None) -> Generator[Step[Any]]:
        """Yields the steps of an epoch with ``fn`` applied to each batch, e.g. to move it to a device. Unlike in a loop's own
        body, a step for which ``fn`` fails does not count as used."""
        self._stop()
        if self._num_used and self._next == self._epoch + 1:
            warn_user(
                f"epoch {self._epoch} was left after {self._num_used} updates, and this iteration is epoch "
                f"{self._next}: each iteration is an epoch. To go on in an epoch, keep one iterator; to "
                "begin an epoch again on purpose, call set_epoch(...) first"
            )
        self._choose()
        self._next = self._epoch + 1
        self._begun = True
        self._began_at = self._place_to_begin()
        self._num_used = 0
        live = self._run(fn)
        self._live = live
        try:
            for step in live:
                yield step
                if self._live is not live:
                    raise ConfigError(
                        "another iteration of this loader has begun; finish one before the next"
                    )
                if step.ends_update:
                    self._num_used += 1
                    self._began_at = None
            self._num_used = None
        finally:
            self._stop(live)

    def _stop(self, live: Generator[Step[B]] | None = None) -> None:
        """Ends the iteration ``live``, or the running one if it is None."""
        if live is None:
            live = self._live
        if live is None:
            return
        if self._live is live:
            self._live = None
            if self._num_used == 0 and self._next == self._epoch + 1:
                self._next = self._epoch  # no update was used, so this was no epoch
            elif self._next != self._epoch + 1:
                self._choose()  # set_epoch was called during the iteration
        live.close()

    def updates(self) -> Iterator[list[Step[B]]]:
        """Yields the same steps as iteration, as one list per update."""
        update: list[Step[B]] = []
        with closing(iter(self)) as steps:
            for step in steps:
                update.append(step)
                if step.ends_update:
                    yield update
                    update = []

    @property
    def num_updates(self) -> int:
        """Number of updates in :attr:`epoch`, exact unless sizes are changed. ConfigError: not known in advance."""
        return self._walk().num_updates(self.epoch)

    def updates_in(self, epochs: float) -> int:
        """Returns the number of updates in this many epochs from the start of training; fractions are allowed."""
        epochs = check_number("epochs", epochs, or_zero=True)
        walk = self._walk()
        whole_epochs = max(math.ceil(epochs), 1) - 1
        in_last_epoch = walk.num_updates(whole_epochs)
        # as Trainers count: 2.1 epochs of 10 are 21; 20 + ceil((2.1 - 2) * 10) is 22
        further = math.ceil(epochs * in_last_epoch) - whole_epochs * in_last_epoch
        return walk.start(whole_epochs).update + further

    def samples_after(self, updates: int) -> int:
        """Returns how many samples training has used, over all ranks, after this many updates from its start (without
        ``samples_per_update`` at least those of the epochs before the current one, or before a resume)."""
        return self._walk().after(check_int("updates", updates, least=0)).samples_seen

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's state, for JSON; all yielded steps count as used. Save the states of all ranks.

        A state is valid between two steps. StateError: loading of an online loader failed or was interrupted."""
        learned = LearningBudget.saved(self.budget)
        return sealed(self.KIND, self._compared(), {"learned": learned, **self._state()})

    def _compared(self) -> dict[str, object]:
        """Returns all that a saved state and the run that loads it must have in common."""
        return {**self._identity(), "identity": self._users_identity}

    def load_state_dict(self, state_dict: State | Sequence[State]) -> None:
        """Resumes from saved states, on any number of ranks: the next iteration gives exactly the steps that remained.

        Args:
            state_dict: this rank's state, or the list of all ranks' states.

        Raises StateError if a state is damaged, from other data or settings, or missing; then nothing is changed."""
        states = listed(state_dict)
        rank, world_size = self._rank_and_size()
        checked = self._checked(opened(states, self.KIND, self._compared()))
        state_of_limits = states[rank if len(states) == world_size else 0]
        with LearningBudget.taken_up(self.budget, state_of_limits):
            self._stop()
            self._restore(checked)
        self._begun = False
        self._num_used = None


def check_options(loader: type[StepLoader[Any]], options: Iterable[str]) -> None:
    """Raises ConfigError for an option that torch's DataLoader does not have, and suggests one of either loader."""
    torch_options = signature(DataLoader).parameters
    check_names(loader.__name__, options, [*signature(loader).parameters, *torch_options])


def check_updates(samples_per_update: object, accumulation: int, **needs_set_sizes: bool) -> int:
    """Checks that ``accumulation`` is not given beside ``samples_per_update``, and that settings which need
    ``samples_per_update`` have it; returns ``accumulation``."""
    accumulation = check_int("accumulation", accumulation)
    if isinstance(samples_per_update, type):
        raise ConfigError(
            "`samples_per_update` must be an int of at least 1, but is "
            f"{samples_per_update!r}; or give a function (update, current) -> int"
        )
    for name, is_given in needs_set_sizes.items():
        if check_flag(name, is_given) and samples_per_update is None:
            raise ConfigError(
                f"`{name}` needs `samples_per_update`, which fixes the size of updates; give it as well"
            )
    if samples_per_update is not None and accumulation != 1:
        raise ConfigError(
            f"`accumulation` ({accumulation}) and `samples_per_update` cannot both be given; with "
            "`samples_per_update`, leave `accumulation` out"
        )
    return accumulation


ENDED_EARLY = (
    "the dataset, `collate_fn` or `weigh` raised StopIteration before the epoch's end; none of them "
    "may"
)


class RequestQueue:
    """The ``batch_sampler`` of an inner DataLoader: yields requests while ``pull`` returns any. Between epochs it knows
    no loader: torch needs five seconds to stop each worker of a DataLoader that is part of a reference cycle."""

    pull: Callable[[], object] | None = None

    def __iter__(self) -> Iterator[Any]:
        while self.pull is not None:
            request = self.pull()
            if request is None:
                return
            yield request


class Inner:
    """The user's settings for a ``DataLoader``, and that DataLoader, which is made on first use."""

    def __init__(self, kwargs: Mapping[str, Any]) -> None:
        if "batch_size" in kwargs:
            raise ConfigError(
                "`batch_size` must be left out: the budget decides how large a batch is"
            )
        if not check_flag("in_order", kwargs.get("in_order", True)):
            raise ConfigError(
                "`in_order=False` must be left out: batches are always used in the planned order"
            )
        # A generator of its own: otherwise the DataLoader would draw from torch's, and do so once more after resuming.
        self._generator = torch.Generator()
        kwargs = checked_kwargs(kwargs, batch_sampler=[])
        self.kwargs = {**kwargs, "generator": kwargs.get("generator") or self._generator}
        self.queue = RequestQueue()
        self.loader: DataLoader[Any] | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "loader": None}

    def seed(self, *place: int) -> None:
        """Seeds the random numbers in workers, unless the user gave a generator."""
        self._generator.manual_seed(seed_of(*place))


def seed_of(*place: int) -> int:
    return int(np.random.SeedSequence(place).generate_state(1)[0])


def checked_kwargs(kwargs: Mapping[str, Any], **ours: Any) -> dict[str, Any]:
    """Returns the arguments for a ``DataLoader``, checked by making an empty one, which starts no worker. ``ours``: the
    arguments that dynagroup sets. ConfigError: torch refuses an argument, or would fail later because of it."""
    num_workers = check_int("num_workers", kwargs.get("num_workers", 0), least=0, most=4096)
    timeout = check_number("timeout", kwargs.get("timeout", 0), or_zero=True)
    if timeout and not num_workers:
        raise ConfigError(
            f"`timeout` ({kwargs['timeout']}) is for workers; set `num_workers`, or leave it out"
        )
    if kwargs.get("prefetch_factor") is not None:
        check_int("prefetch_factor", kwargs["prefetch_factor"])
    generator = kwargs.get("generator")
    is_on_cpu = isinstance(generator, torch.Generator) and generator.device.type == "cpu"
    if generator is not None and not is_on_cpu:
        raise ConfigError(
            f"`generator` must be a torch.Generator on the CPU, or None, but is {generator!r}"
        )
    checked = dict(kwargs)
    start = check_function("worker_init_fn", kwargs.get("worker_init_fn"), "of a worker's number")
    if start is not None:
        checked["worker_init_fn"] = partial(_start, start)
    what = f"torch's DataLoader refuses the arguments {kwargs!r:.300}"
    with warnings.catch_warnings(), explained(what, way_out="; change them"):
        warnings.simplefilter("ignore")  # the real DataLoader gives the same warnings
        DataLoader([], **ours, **checked)  # type: ignore[arg-type]
    return checked


@sendable(lambda: "worker_init_fn failed")
def _start(worker_init_fn: Callable[[int], object], worker: int) -> None:
    worker_init_fn(worker)
