"""Runs any function over the items of a dataset, in batches that fit."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from numpy.typing import ArrayLike

from dynagroup.budget.base import Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.budget.tokens import as_budget
from dynagroup.distributed import World
from dynagroup.errors import ConfigError
from dynagroup.fingerprint import described, ends_of, hashed
from dynagroup.jobs.formats import JSON_LINES, VECTORS
from dynagroup.jobs.run import Job, Plan, all_results, results_as_they_come
from dynagroup.lengths import as_streams
from dynagroup.text.measure import by_position, is_hf_dataset
from dynagroup.validation import check_function, check_identity

T = TypeVar("T")


def map_batches(
    function: Callable[[Any], Sequence[Any]],
    items: Sequence[T],
    lengths: ArrayLike | Mapping[str, ArrayLike] | Path,
    budget: Budget | int,
    *,
    collate_fn: Callable[[list[T]], Any] | None = None,
    output: str | Path | None = None,
    load: bool = True,
    progress: bool = True,
    is_out_of_memory: Callable[[Exception], bool] | None = None,
    learned: LearningBudget | None = None,
    identity: Any = None,
    world: World | None = None,
) -> Any:
    """Returns ``function``'s result for every item, in the order of the items; it is called on batches that fit.

    Batches have items of similar length, longest first. If a batch runs out of memory, its items run again in halves,
    and later batches of that size are split before they run. Under ``torchrun`` ranks share the items, and every rank
    returns all results.

    Args:
        function: from a batch to one result per item, in order: a model's forward pass, an ONNX session, a request to a
            server. It must change nothing when it fails, and give an item the same result in any batch.
        items: sequence of N items.
        lengths: int (N,), or a dict of such arrays by stream, or the path of a file of them.
        budget: limit of a batch; an int means that many tokens.
        collate_fn: function from a list of items to a batch. None: the batch is the list.
        output: path of a file to write: ``.jsonl`` for results that JSON can store, ``.npy`` for float32 vectors of one
            width; required on several ranks. Finished items are saved beside it: after a crash the same call runs the
            rest. A complete file is only read.
        load: False returns None and leaves the results in ``output``: memory then holds those of one batch at a time.
        progress: True shows a bar on a terminal.
        is_out_of_memory: function from an error to whether fewer items may succeed, for errors of other libraries.
            Usual out-of-memory errors count in any case, see :func:`~dynagroup.oom.is_out_of_memory`.
        learned: a :class:`~dynagroup.LearningBudget` that learns from failures.
        identity: a text or another value for JSON, compared with that of earlier results in ``output``, beside the
            function's name, the lengths, and the first and last item. Change it when the function's code or weights do.
        world: ranks that share the work. None: all of ``torch.distributed``.

    Raises ConfigError if arguments contradict each other, or ``function`` returns another number of results; BudgetError
    if an item does not fit even alone (the message names it); StateError if ``output`` belongs to other arguments.

    >>> words = ["a", "bb", "cccc", "dd"]
    >>> map_batches(lambda batch: [word.upper() for word in batch], words, [1, 2, 4, 2], budget=4)
    ['A', 'BB', 'CCCC', 'DD']
    """
    job = _MapJob(function, items, lengths, budget, collate_fn, is_out_of_memory)
    job.learned = learned
    job.progress = progress
    job.load = load
    job.user_identity = check_identity(identity)
    return all_results(job, output, world)


def iter_map(
    function: Callable[[Any], Sequence[Any]],
    items: Sequence[T],
    lengths: ArrayLike | Mapping[str, ArrayLike] | Path,
    budget: Budget | int,
    *,
    collate_fn: Callable[[list[T]], Any] | None = None,
    skip: Collection[int] = (),
    progress: bool = True,
    is_out_of_memory: Callable[[Exception], bool] | None = None,
    learned: LearningBudget | None = None,
) -> Iterator[tuple[int, Any]]:
    """Yields (index, result) like :func:`map_batches`, batch by batch, longest items first, without those in ``skip``.

    Nothing is saved. Memory holds the results of one batch. Ranks do not share the items.

    >>> words = ["a", "bb", "cccc", "dd"]
    >>> list(iter_map(lambda batch: [word.upper() for word in batch], words, [1, 2, 4, 2], budget=4))
    [(2, 'CCCC'), (1, 'BB'), (3, 'DD'), (0, 'A')]
    """
    job = _MapJob(function, items, lengths, budget, collate_fn, is_out_of_memory)
    job.learned = learned
    job.progress = progress
    return results_as_they_come(job, skip)


class _MapJob(Job):
    formats = (JSON_LINES, VECTORS)
    user_identity: Any = None

    def __init__(
        self,
        function: Callable[[Any], Sequence[Any]],
        items: Sequence[Any],
        lengths: ArrayLike | Mapping[str, ArrayLike] | Path,
        budget: Budget | int,
        collate_fn: Callable[[list[Any]], Any] | None,
        is_out_of_memory: Callable[[Exception], bool] | None,
    ) -> None:
        self.function = check_function("function", function, "from a batch to one result per item")
        self.collate_fn = check_function(
            "collate_fn", collate_fn, "from a list of items to a batch"
        )
        self.is_out_of_memory = check_function(
            "is_out_of_memory", is_out_of_memory, "from an error to True or False"
        )
        self.items = items if is_hf_dataset(items) else by_position(items, "items")
        self.lengths = as_streams(lengths)
        self.budget = budget
        for values in self.lengths.values():
            if len(values) != len(self.items):
                raise ConfigError(
                    f"`lengths` has {len(values)} lengths for {len(self.items)} items; give one per item"
                )

    def run(self, items: list[Any]) -> Sequence[Any]:
        try:
            return self.function(items if self.collate_fn is None else self.collate_fn(items))
        except Exception as error:
            if self.is_out_of_memory is None or not self.is_out_of_memory(error):
                raise
            raise MemoryError(f"{type(error).__name__}: {error}") from error

    def plan(self) -> Plan:
        budget = as_budget(self.budget).bind(self.lengths)
        return Plan(lengths=self.lengths, budget=budget)

    def identity(self) -> dict[str, object]:
        return {
            "function": described(self.function),
            "items": f"{len(self.items)} items {hashed(ends_of(self.items))}",
            "lengths": hashed(described(dict(self.lengths))),
            "identity": self.user_identity,
        }
