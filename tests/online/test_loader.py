"""An online loader's promises beside the laws: what it refuses and when, and that a fault of one rank ends all."""

import contextlib
import os
import re
import signal
import weakref
from itertools import chain, count, islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dynagroup import MemoryBudget, OnlineDataLoader, TokenBudget
from dynagroup.distributed import SingleProcess
from dynagroup.errors import AlignmentError, ConfigError, StateError
from dynagroup.memory import PaddedTokens
from dynagroup.testing import run_ranks
from tests.online.helpers import (
    Stream,
    Tokens,
    all_ids,
    as_json,
    collate,
    ids_of,
    lengths_of,
    make_loader,
    used,
)

LENGTHS = lengths_of(60, seed=3)
SHARDED = torch.utils.data.DistributedSampler(range(60), num_replicas=2, rank=0)
WRONG: list[tuple[dict[str, Any], str]] = []
WRONG += [({"window": 0}, "`window`")]
WRONG += [({"shuffle": True, "sampler": [0]}, "both set the order")]
WRONG += [({"length_hint": [1.0]}, "`length_hint`")]
WRONG += [({"sampler": SHARDED}, "already shards over 2")]
WRONG += [({"sampler": iter([0, 1])}, "anew in every epoch, but is <list_iterator")]
WRONG += [({"batch_sampler": iter([[0]])}, "anew in every epoch")]
WRONG += [({"samples_per_update": 4, "batch_sampler": [[0]]}, "no `batch_sampler`")]
WRONG += [({"kind_of": "kind"}, "`kind_of` must be a function")]
WRONG += [({"kind_of": len, "kinds": [1] * 60}, "`kinds` and `kind_of` both label the samples")]
WRONG += [({"kinds": [1, 2, 3]}, "`kinds` has 3 labels")]
WRONG += [({"one_kind": "batch"}, "`one_kind`.*needs a label")]
WRONG += [({"dataset": Stream, "kinds": ["a"]}, "`kinds` needs a map-style dataset")]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_arguments_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_loader(None, LENGTHS, **options)


def first_step(**options: Any) -> Any:
    return next(iter(make_loader(None, LENGTHS, **options)))


def test_a_batch_sampler_yields_lists() -> None:
    with pytest.raises(ConfigError, match="`batch_sampler` must yield lists of dataset indices"):
        first_step(batch_sampler=[0, 1])


def test_a_batch_sampler_yields_indices_of_samples() -> None:
    message = "`batch_sampler` yields index -1, but there are only 60 samples"
    with pytest.raises(ConfigError, match=message):
        first_step(batch_sampler=[[0, -1]])


def test_a_kind_is_hashable() -> None:
    message = r"hashable label, but returned \['a'\] for sample 0"
    with pytest.raises((ConfigError, RuntimeError), match=message):
        first_step(kind_of=lambda sample: ["a"])


def test_a_kind_equals_its_copy() -> None:
    message = r"hashable label, but returned <object .* for sample 0 \(TypeError: it does not"
    with pytest.raises((ConfigError, RuntimeError), match=message):
        first_step(kind_of=lambda sample: object())


def test_an_error_of_kind_of_names_the_sample() -> None:
    with pytest.raises((ConfigError, RuntimeError), match="kind_of failed on sample 0: KeyError"):
        first_step(kind_of=lambda sample: sample["modality"])


def test_an_update_has_samples() -> None:
    message = "`samples_per_update` must be an int of at least 1.* at update 0"
    with pytest.raises(ConfigError, match=message):
        first_step(samples_per_update=lambda *_: 0)


def test_a_sample_that_is_longer_than_every_hint_has_a_shape_too() -> None:
    """Also where a batch may have fewer samples than tokens."""
    loader = OnlineDataLoader(
        Tokens([4] * 30 + [50]),
        TokenBudget(64, max_samples=8),
        length_hint=[4] * 31,
        shapes=2,
        weigh="samples",
        collate_fn=collate,
    )
    batches = [step.batch["input_ids"] for step in loader if not step.idle]
    assert {tuple(batch.shape) for batch in batches} == {(8, 4), (1, 64)}


def test_a_loader_is_let_go_of_at_once() -> None:
    """In a circle of objects its workers would take five seconds each to end."""
    loader = make_loader(
        None, LENGTHS, samples_per_update=16, num_workers=1, persistent_workers=True
    )
    list(islice(loader, 2))
    reference = weakref.ref(loader)
    del loader
    assert reference() is None


UNLIMITED = MemoryBudget(2, model=PaddedTokens())


@pytest.mark.parametrize("budget", [UNLIMITED, TokenBudget(900) & UNLIMITED])
def test_a_budget_without_a_limit_is_refused_at_once(budget: Any) -> None:
    with pytest.raises(ConfigError, match="longest=tokens of the longest sample"):
        OnlineDataLoader(Tokens(LENGTHS), budget, collate_fn=collate)


def test_a_known_longest_sample_limits_a_budget() -> None:
    known = MemoryBudget(2, longest=64, model=PaddedTokens())
    loader = OnlineDataLoader(Tokens(LENGTHS), known, collate_fn=collate)
    assert sum(len(step.indices) for step in loader) == 60


def num_padded(loader: Any) -> int:
    """Tokens of the batches of one epoch."""
    return sum(step.batch["input_ids"].numel() for step in loader if not step.idle)


@pytest.mark.parametrize(
    "options", [{"drop_last": True, "samples_per_update": 16}, {"sampler": range(0, 60, 2)}]
)
def test_lengths_of_the_samples_in_use_are_enough(options: dict[str, Any]) -> None:
    """In a fixed order the last samples never come: the others' lengths plan the next epoch all the same."""

    def run(world: Any) -> list[int]:
        loader = make_loader(world, LENGTHS, **options)
        return [num_padded(loader) for _ in range(2)]

    first, second = np.sum(run_ranks(2, run), axis=0)
    assert second < first, "batches of known lengths are matched"


ORDERS: list[tuple[str, Any]] = [("sampler", range(60))]
ORDERS += [("batch_sampler", [[i, i + 1] for i in range(0, 60, 2)])]


@pytest.mark.parametrize(("name", "order"), ORDERS)
def test_a_state_of_another_order_is_refused(name: str, order: Any) -> None:
    """Taken over, it would lose samples and repeat others."""
    loader = make_loader(None, LENGTHS, **{name: list(order)})
    samples = ids_of(islice(loader, 3))
    state = as_json(loader.state_dict())
    other = make_loader(None, LENGTHS, **{name: list(order[::-1])})
    with pytest.raises(StateError, match=f"`{name}` must give the same indices in epoch 0"):
        other.load_state_dict(state)
    same = make_loader(None, LENGTHS, **{name: list(order)})
    same.load_state_dict(state)
    samples += ids_of(same)
    assert sorted(samples) == list(range(60))


def stopped(loader: Any, count: int = 1) -> Any:
    for _ in islice(loader, count):
        pass
    return loader.state_dict()


class Gone(Tokens):
    def __getitem__(self, index: int) -> Any:
        raise OSError("the disk is gone")


def copy_of(world: Any) -> SimpleNamespace:
    """Returns a world whose methods a test may replace."""
    return SimpleNamespace(
        rank=world.rank,
        size=world.size,
        all_max=world.all_max,
        all_sum=world.all_sum,
        exchange=world.exchange,
    )


@pytest.fixture(scope="module")
def states() -> Any:
    """Of two ranks after a step, as the epoch's last steps were agreed: resumed ranks ask whether that is still the end."""
    states = run_ranks(2, lambda world: stopped(make_loader(world, LENGTHS)))
    assert states[0]["running"]["ended"]
    return states


def test_a_rank_takes_no_other_ranks_state(states: Any) -> None:
    def load(world: Any) -> None:
        other = 1 - world.rank
        loader = make_loader(world, LENGTHS)
        message = rf"this is rank {world.rank} of 2, .* ranks \[{other}\] of 2"
        with pytest.raises(StateError, match=message):
            loader.load_state_dict(states[other])

    run_ranks(2, load)


def test_a_rank_that_cannot_load_again_tells_the_others(states: Any) -> None:
    def load(world: Any) -> None:
        loader = make_loader(world, LENGTHS, dataset=[Tokens, Gone][world.rank])
        loader.load_state_dict(states[world.rank])
        error = [AlignmentError, RuntimeError][world.rank]
        with pytest.raises(error, match="the disk is gone"):
            list(loader)

    run_ranks(2, load)


def test_ranks_may_be_known_after_the_states_were_loaded(states: Any) -> None:
    """As if init_process_group came after ``load_state_dict``."""

    def usual(world: Any) -> list[Any]:
        loader = make_loader(world, LENGTHS)
        loader.load_state_dict(states[world.rank])
        return list(loader)

    def late(world: Any) -> list[Any]:
        alone = copy_of(world)
        alone.rank = 0
        alone.size = 1
        loader = make_loader(alone, LENGTHS)
        loader.load_state_dict(states)
        alone.rank = world.rank
        alone.size = world.size
        return list(loader)

    assert all_ids(run_ranks(2, late)) == all_ids(run_ranks(2, usual))


def test_one_process_needs_the_states_of_all_ranks(states: Any) -> None:
    with pytest.raises(StateError, match="the list of all"):
        make_loader(SingleProcess(), LENGTHS).load_state_dict(states[0])
    with pytest.raises(StateError, match=r"ranks \[0, 0\] of 2"):
        make_loader(SingleProcess(), LENGTHS).load_state_dict([states[0]] * 2)


def leg(
    world: Any,
    states: Any,
    gone: Any = (),
    stop: int | None = None,
    fails: Any = (AlignmentError, RuntimeError),
    **how: Any,
) -> tuple[list[int], Any]:
    """Samples that this rank uses until it stops or fails, and its state then."""
    data = how.pop("data", Gone if world.rank in gone else Tokens)
    loader = make_loader(world, LENGTHS, dataset=data, **how)
    if states:
        loader.load_state_dict(states)
    samples = []
    with contextlib.suppress(*fails):
        for step in islice(loader, stop):
            samples += used(step)
    return samples, as_json(loader.state_dict())


def legs(num_ranks: int, states: Any, **how: Any) -> tuple[list[int], list[Any]]:
    """Samples that all ranks use until they stop or fail, and their states then."""
    ends = run_ranks(num_ranks, lambda world: leg(world, states, **how))
    samples, states = zip(*ends, strict=True)
    return list(chain.from_iterable(samples)), list(states)


@pytest.mark.parametrize(
    "how", [{"samples_per_update": 30}, {"accumulation": 5, "window": 8}, {"window": 8}]
)
@pytest.mark.parametrize("gone", [[(0,)], [(0, 1), (1,)]])
def test_a_resume_that_fails_before_its_first_step_leaves_the_state_as_it_was(
    how: Any, gone: Any
) -> None:
    """Fails once or twice, on some ranks, within an update; then all samples come, on as many ranks or on others."""
    for num_ranks in (1, 2):
        samples, states = legs(2, None, stop=3, **how)
        for failing in gone:
            nothing, states_then = legs(2, states, gone=failing, **how)
            assert nothing == []
            assert states_then == states
        rest, _ = legs(num_ranks, states, **how)
        assert sorted(samples + rest) == list(range(60))
    with pytest.raises(StateError, match="run one step before saving again"):
        leg(SingleProcess(), states, gone=(0,), **how)


@pytest.mark.parametrize("how", [{"samples_per_update": 30}, {}])
def test_an_epoch_that_fails_as_it_begins_is_not_used_up(how: Any) -> None:
    """One rank has stopped between two epochs, so the other loses contact as the next one begins."""

    def run(world: Any, states: Any, epochs: int) -> tuple[list[list[int]], Any]:
        copy = copy_of(world)
        loader = make_loader(copy, LENGTHS, **how)
        if states:
            loader.load_state_dict(states)
        samples = [[], []]
        with contextlib.suppress(AlignmentError):
            for epoch in range(loader.epoch, epochs):
                if epoch and not states:
                    copy.all_max = lost
                for step in loader:
                    samples[epoch] += used(step)
        return samples, as_json(loader.state_dict())

    begun = run_ranks(2, lambda world: run(world, None, 2 - world.rank))
    states = [state for _, state in begun]
    for num_ranks in (1, 2):
        rest = run_ranks(num_ranks, lambda world: run(world, states, 2))
        for epoch in (0, 1):
            samples = [samples_of[epoch] for samples_of, _ in begun + rest]
            assert sorted(chain.from_iterable(samples)) == list(range(60))


def lost(values: Any) -> Any:
    raise AlignmentError("lost contact")


@pytest.mark.parametrize("call", range(12))
@pytest.mark.parametrize("how", [{"window": 4, "accumulation": 2}, {"samples_per_update": 9}])
def test_a_rank_that_was_interrupted_between_two_steps_has_no_state_once_its_epoch_has_begun(
    call: int, how: Any
) -> None:
    """Rank 0 as one of its exchanges returns; rank 1 knows by then what was agreed, and fails in its next one."""

    def interrupted(world: Any) -> Any:
        calls = count()

        def interrupting(exchange: Any) -> Any:
            def exchanged(values: Any) -> Any:
                number = next(calls)
                if world.rank and number > call:
                    raise KeyboardInterrupt
                result = exchange(values)
                if not world.rank and number == call:
                    raise KeyboardInterrupt
                return result

            return exchanged

        copy = copy_of(world)
        copy.all_max = interrupting(world.all_max)
        copy.all_sum = interrupting(world.all_sum)
        loader = make_loader(copy, LENGTHS, **how)
        saved = loader.state_dict()
        samples: list[int] = []
        is_over = True
        try:
            for step in loader:
                samples += used(step)
                saved = loader.state_dict()
        except KeyboardInterrupt:
            is_over = False
        if samples and not is_over:
            with pytest.raises(StateError, match="interrupted between two steps.*after a step"):
                loader.state_dict()
        return samples, as_json(saved)

    samples_of, states = zip(*run_ranks(2, interrupted), strict=True)
    if len({state["cursor"]["steps"] for state in states}) > 1:
        with pytest.raises(StateError, match="after different steps"):
            make_loader(SingleProcess(), LENGTHS, **how).load_state_dict(states)
        return
    samples = list(chain.from_iterable(samples_of))
    rest, _ = legs_of_own_states(states, fails=(), **how)
    if {state["epoch"] for state in states} == {0}:
        samples += rest
    assert sorted(samples) == list(range(len(LENGTHS)))


def legs_of_own_states(states: Any, **how: Any) -> Any:
    """As ``legs``, each of two ranks from its own state."""
    ends = run_ranks(2, lambda world: leg(world, states[world.rank], **how))
    samples, states = zip(*ends, strict=True)
    return list(chain.from_iterable(samples)), states


def num_tokens(sample: Any) -> int:
    return len(sample["input_ids"])


def short_and_long(_: Any) -> Tokens:
    return Tokens([1] * 12 + [20] * 12)


def few_fail(samples: Any) -> Any:
    if len(samples) < 6 and len(samples[0]["input_ids"]) == 1:
        raise ValueError("statistics need six samples")
    return collate(samples)


def rounded(samples: Any) -> Any:
    batch = collate(samples)
    num_added = -batch["labels"].shape[1] % 8
    for name, values in batch.items():
        batch[name] = torch.nn.functional.pad(values, (0, num_added), value=-100)
    return batch


def fivefold(samples: Any) -> Any:
    """Makes five tokens of each token of the samples that rank 0 gets first."""
    grown = []
    for sample in samples:
        times = 5 if len(sample["labels"]) < 4 else 1
        grown.append({name: values.repeat(times) for name, values in sample.items()})
    return collate(grown)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("how", [{"window": 12}, {"samples_per_update": 24}])
@pytest.mark.filterwarnings("ignore:`collate_fn` made a batch of:UserWarning")
def test_batches_that_are_cut_again_fit_on_every_rank_with_equal_steps_also_after_a_resume(
    how: Any, num_workers: int
) -> None:
    lengths = [3] * 12 + [10] * 12

    def steps_from(world: Any, states: Any, stop: int | None) -> Any:
        loader = make_loader(
            world, lengths, max_tokens=40, collate_fn=fivefold, num_workers=num_workers, **how
        )
        if states:
            loader.load_state_dict(states)
        steps = list(islice(loader, stop))
        assert all(step.batch["input_ids"].numel() <= 40 for step in steps)
        return steps, as_json(loader.state_dict())

    before = run_ranks(2, lambda world: steps_from(world, None, 3))
    states = [state for _, state in before]
    after = run_ranks(2, lambda world: steps_from(world, states, None))
    assert all_ids(steps for steps, _ in before + after) == list(range(24))
    [first, _], [second, _] = after
    assert len(first) == len(second)


@pytest.mark.parametrize("how", [{"window": 12}, {"samples_per_update": 24}])
def test_a_batch_that_fails_as_it_is_split_reaches_every_rank_and_stays_in_the_state(
    how: Any,
) -> None:
    """Rank 0 has one batch of short samples, rank 1 has twelve batches; so rank 0 splits its own, for equal steps."""
    how = how | {"max_tokens": 20, "length_of": num_tokens, "data": short_and_long}
    _, states = legs(2, None, collate_fn=few_fail, **how)
    samples, _ = legs(2, states, **how)
    assert sorted(samples) == list(range(24))


@pytest.mark.parametrize("how", [{"window": 6}, {"samples_per_update": 12}])
@pytest.mark.filterwarnings("ignore:`collate_fn` made a batch of:UserWarning")
def test_a_part_that_is_padded_further_than_measured_is_yielded(how: Any) -> None:
    """The batch ends at a multiple of 8, its last part does not."""
    data = Tokens([8] + [5] * 5 + [40] * 6)
    how = how | {"max_tokens": 48, "length_of": None, "collate_fn": rounded}
    samples, _ = legs(2, None, data=lambda _: data, **how)
    assert sorted(samples) == list(range(12))


def test_schedules_that_differ_are_refused() -> None:
    def run(world: Any) -> None:
        list(make_loader(world, LENGTHS, samples_per_update=lambda *_: 4 + world.rank))

    with pytest.raises(AlignmentError, match=r"ranks have unequal .*sizes of updates"):
        run_ranks(2, run)


def test_a_size_is_refused_where_there_is_none() -> None:
    with pytest.raises(ConfigError, match="made with `samples_per_update`"):
        make_loader(None, LENGTHS).set_samples_per_update(4)


class Faulty(Tokens):
    fault = ""

    def __getitem__(self, index: int) -> Any:
        if self.fault == "item_raises" and index == 77:
            raise KeyError("broken record")
        if self.fault == "worker_dies" and index == 77:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def text_of(world: Any, fault: str) -> str:
    """How the run of a rank ends; what is strange is strange on rank 1."""
    is_strange = world.rank == 1
    num_samples = 2000 if fault == "starts_over" else 200
    data = Faulty(lengths_of(num_samples, seed=3))
    data.fault = fault
    options: dict[str, Any] = {}
    if fault == "worker_dies":
        options["num_workers"] = 2
    if fault == "other_seed" and is_strange:
        options["seed"] = 5
    loader = make_loader(world, [], dataset=lambda _: data, window=8, **options)
    num_steps = 3 if fault == "starts_over" and is_strange else None
    try:
        list(islice(loader, num_steps))
        list(loader)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "ended"


OF_OTHERS = "rank . failed while it loaded data: .*"
FAULTS = [("item_raises", r"samples \[77\] failed: KeyError", rf"{OF_OTHERS}samples \[77\]")]
FAULTS += [("worker_dies", "worker", f"{OF_OTHERS}[Ww]orker")]
FAULTS += [("other_seed", "ranks have unequal seed", "ranks have unequal seed")]
FAULTS += [("starts_over", "different points", "different points")]


@pytest.mark.usefixtures("dead_workers_are_seen_soon")
@pytest.mark.filterwarnings("ignore:epoch 0 was left")
@pytest.mark.parametrize(("fault", "of_faulty", "of_others"), FAULTS)
def test_a_fault_reaches_every_rank(fault: str, of_faulty: str, of_others: str) -> None:
    texts = run_ranks(3, lambda world: text_of(world, fault))
    of_all = f"{of_faulty}|{of_others}"
    assert all(re.search(of_all, text, re.S) for text in texts), texts
    of_the_others = [text for text in texts if re.search(of_others, text, re.S)]
    assert len(of_the_others) >= 2, texts
