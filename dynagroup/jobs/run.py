"""Runs the items of a dataset through a function, in batches that fit, longest first, on one or several ranks."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.distributed import World, current_world, on_all_ranks
from dynagroup.errors import ConfigError
from dynagroup.fingerprint import hashed
from dynagroup.jobs.formats import Format, format_of
from dynagroup.jobs.storage import Output
from dynagroup.oom.retry import Retry
from dynagroup.oom.take import BatchSplitter
from dynagroup.plan.cost import Work
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.shapes import BatchShape, IntArray, Streams, primary
from dynagroup.validation import fetch

CONTINUE = "continue the job"
# A month: ranks wait for each other until all have finished. Dead ranks close their connections.
_PATIENCE_S = 30 * 24 * 3600.0
_MOST_SETTINGS = 32  # that ranks compare by name


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is known when all items are measured."""

    lengths: Streams
    budget: Budget
    """Bound to the lengths."""
    work: Work | None = None
    """Predicted time of a batch, None: the default."""
    num_copies: int = 1
    """Rows that an item takes in memory, such as beams."""
    num_new: int = 0
    """Tokens that each item gets in addition to its own."""

    def shape_of(self, indices: Sequence[int]) -> BatchShape:
        """Returns the shape (K = 1) that decides the memory of a batch."""
        multiple = self.budget.pad_to_multiple_of
        longest = {}
        for name, values in self.lengths.items():
            width = int(values[indices].max())
            longest[name] = max(-(-width // multiple) * multiple, 1)
        longest[primary(longest)] += self.num_new
        return BatchShape.of(len(indices) * self.num_copies, longest)

    def tokens(self) -> IntArray:
        """Returns the tokens of each item, summed over streams."""
        return np.stack(list(self.lengths.values())).sum(axis=0, dtype=np.int64)


class Job:
    """A function over a dataset. Nothing is measured or described before it is needed."""

    items: Sequence[Any]
    formats: Sequence[Format]
    """Of results; the ending of the output file chooses one."""
    learned: LearningBudget | None = None
    progress: bool = True
    load: bool = True
    """False: results stay in the output file, and None is returned."""

    def run(self, items: list[Any]) -> Iterable[Any]:
        """Returns the results of a batch of items, in order. It leaves nothing behind when it fails."""
        raise NotImplementedError

    def plan(self) -> Plan:
        """Measures all items, and raises the user's errors before anything is run; called once."""
        raise NotImplementedError

    def identity(self) -> Mapping[str, object]:
        """Returns what results depend on, as values for JSON."""
        raise NotImplementedError


def all_results(job: Job, output: str | Path | None = None, world: World | None = None) -> Any:
    """Returns all results in input order; reads them from ``output`` if that file is complete."""
    if output is None and not job.load:
        raise ConfigError("`load` is False, so results go nowhere; give `output`, a path")
    first = world
    if first is None:  # ranks lost before the job are noticed within ten minutes, not a month
        first = current_world()
    if output is None and first.size == 1:
        results: list[Any] = [None] * len(job.items)
        for index, result in results_as_they_come(job):
            results[index] = result
        return job.formats[0].gather(results)
    out = on_all_ranks(first, lambda: _output_of(job, output, first.size), CONTINUE)
    if world is None:
        world = current_world(timeout_s=_PATIENCE_S)
    _check_same_job(out.identity, world)
    if _is_true_on_any(world, out.is_finished):
        if world.rank == 0 and len(job.items) > 0:
            out.log_earlier_results(len(job.items))
    else:
        _finish(job, out, world)
    if world.rank == 0:
        out.clear()  # an earlier run may have been killed after writing the output
    return out.read() if job.load else None


def results_as_they_come(job: Job, skip: Collection[int] = ()) -> Iterator[tuple[int, Any]]:
    """Yields (index, result) as batches finish, longest items first."""
    plan = job.plan()
    done = np.zeros(len(job.items), np.bool_)
    for index in skip:
        if not 0 <= index < len(done):
            raise ConfigError(
                f"`skip` must have indices from 0 to {len(done) - 1}, but has {index}"
            )
        done[index] = True
    return _flat(_batches(job, plan, done, rank=0, num_ranks=1))


def _flat(batches: Iterator[tuple[list[int], list[Any]]]) -> Iterator[tuple[int, Any]]:
    for indices, results in batches:
        yield from zip(indices, results, strict=True)


def _output_of(job: Job, output: str | Path | None, num_ranks: int) -> Output:
    if output is None:
        raise ConfigError(
            f"{num_ranks} ranks need `output`, the path of a file that all ranks can read and write"
        )
    path = Path(output)
    return Output(path, job.identity(), len(job.items), format_of(path, job.formats))


# Ranks wait for each other four times: until the first has locked the output; until all have read what was finished
# before (only then may any add to it); until all have finished (then the first writes the output); and until it
# exists. The lock is kept until then, so another process is either refused, or finds a complete output.
def _finish(job: Job, out: Output, world: World) -> None:
    plan = on_all_ranks(world, job.plan, CONTINUE)

    def run_rest() -> None:
        for indices, results in _batches(job, plan, done, world.rank, world.size):
            out.append(indices, results)

    with closing(out):
        is_finished = _is_true_on_any(world, lambda: world.rank == 0 and out.claim())
        if is_finished:  # another process has finished the job
            return
        done = on_all_ranks(world, lambda: out.finished().are_finished, CONTINUE)
        if done.any() and world.rank == 0:
            out.log_earlier_results(int(done.sum()))
        on_all_ranks(world, run_rest, CONTINUE)
        on_all_ranks(world, lambda: out.publish() if world.rank == 0 else None, CONTINUE)


def _is_true_on_any(world: World, ask: Callable[[], bool]) -> bool:
    is_true = on_all_ranks(world, ask, CONTINUE)
    return bool(world.all_max([int(is_true)])[0])


def _batches(
    job: Job, plan: Plan, done: NDArray[np.bool_], rank: int, num_ranks: int
) -> Iterator[tuple[list[int], list[Any]]]:
    """Yields (indices, results) of each batch of this rank's share of the items that are not ``done``."""
    from tqdm.auto import tqdm

    tokens = plan.tokens()
    longest_first = np.argsort(-tokens, kind="stable")
    missing = longest_first[~done[longest_first]]
    share = missing[rank::num_ranks]  # the same whatever the ranks' budgets are
    retry = Retry(
        splitter=BatchSplitter(),
        learned=job.learned if job.learned is not None else LearningBudget(),
        shape=lambda indices, num_items: plan.shape_of(indices),
        describe=lambda indices: _described(indices, tokens),
    )
    is_shown = job.progress and rank == 0
    with tqdm(  # disable=None hides the bar where output is not a terminal
        total=int(tokens[share].sum()),  # in tokens, like time
        unit="tok",
        unit_scale=True,
        disable=None if is_shown else True,
    ) as bar:
        for indices in _planned(plan, share):
            parts = retry.run(lambda part: _run_part(job, part), indices, indices)
            yield indices, list(chain.from_iterable(parts))
            bar.update(int(tokens[indices].sum()))


def _planned(plan: Plan, indices: IntArray) -> Iterator[list[int]]:
    """Yields the items of each batch, largest batches first."""
    lengths = {name: values[indices] for name, values in plan.lengths.items()}
    sampler = LengthAwareBatchSampler(lengths, plan.budget, work=plan.work, rank=0, world_size=1)
    for batch in sampler:
        yield indices[batch].tolist()


def _run_part(job: Job, indices: list[int]) -> list[Any]:
    results = job.run(fetch(job.items, indices))
    if not isinstance(results, Iterable):
        raise ConfigError(
            f"the function returned {results!r:.200} for {len(indices)} items; it must return one result per item, in order"
        )
    results = list(results)
    if len(results) != len(indices):
        raise ConfigError(
            f"the function returned {len(results)} results for {len(indices)} items; it must return one per item, in "
            "order"
        )
    return results


def _described(indices: Sequence[int], tokens: IntArray) -> str:
    longest = int(tokens[indices].max())
    if len(indices) == 1:
        return f"{longest} tokens"
    return f"{len(indices)} samples of up to {longest} tokens"


def _check_same_job(identity: Mapping[str, object], world: World) -> None:
    """Raises ConfigError on all ranks if they have different jobs, and names what differs."""
    numbers = [0] * _MOST_SETTINGS  # jobs that differ may have other settings
    for place, item in enumerate(identity.items()):
        numbers[place] = int(hashed(repr(item), 12), 16)
    highest = world.all_max(numbers)
    lowest = world.all_max([-number for number in numbers])
    differing = []
    for place, name in enumerate(identity):
        if highest[place] != -lowest[place]:
            differing.append(name)
    if differing:
        raise ConfigError(
            f"all ranks must run the same job, but have different {', '.join(differing)}; give all ranks the same"
        )
