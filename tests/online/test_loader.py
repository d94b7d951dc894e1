"""An online loader's promises beside the laws: what it refuses and when, and that a fault of one rank ends all."""

import contextlib
import json
import os
import re
import signal
import weakref
from itertools import count, islice
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
from tests.online.helpers import Stream, Tokens, all_ids, collate, lengths_of, make_loader, used

LENGTHS = lengths_of(60, seed=3)
WRONG = [
    ({"window": 0}, "`window`"),
    ({"shuffle": True, "sampler": [0]}, "both set the order"),
    ({"length_hint": [1.0]}, "`length_hint`"),
    (
        {"sampler": torch.utils.data.DistributedSampler(range(60), num_replicas=2, rank=0)},
        "already shards over 2",
    ),
    ({"sampler": iter([0, 1])}, "anew in every epoch, but is <list_iterator"),
    ({"batch_sampler": iter([[0]])}, "anew in every epoch"),
    ({"samples_per_update": 4, "batch_sampler": [[0]]}, "no `batch_sampler`"),
    ({"batch_sampler": [0, 1]}, "`batch_sampler` must yield lists of dataset indices"),
    (
        {"batch_sampler": [[0, -1]]},
        "`batch_sampler` yields index -1, but there are only 60 samples",
    ),
    ({"kind_of": "kind"}, "`kind_of` must be a function"),
    ({"kind_of": lambda sample: ["a"]}, r"hashable label, but returned \['a'\] for sample 0"),
    (
        {"kind_of": lambda sample: object()},
        r"hashable label, but returned <object .* for sample 0 \(TypeError: it does not",
    ),
    ({"kind_of": lambda sample: sample["modality"]}, "kind_of failed on sample 0: KeyError"),
    ({"kind_of": len, "kinds": [1] * 60}, "`kinds` and `kind_of` both label the samples"),
    ({"kinds": [1, 2, 3]}, "`kinds` has 3 labels"),
    ({"one_kind": "batch"}, "`one_kind`.*needs a label"),
    ({"dataset": Stream, "kinds": ["a"]}, "`kinds` needs a map-style dataset"),
    (
        {"samples_per_update": lambda *_: 0},
        "`samples_per_update` must be an int of at least 1.* at update 0",
    ),
]


@pytest.mark.parametrize(("options", "match"), WRONG)
def test_wrong_arguments_are_refused(options: dict[str, Any], match: str) -> None:
    made = lambda: make_loader(None, LENGTHS, **options)  # noqa: E731
    late = any(word in match for word in ("sample 0", "at update 0", "yield"))
    with pytest.raises((ConfigError, RuntimeError), match=match):
        next(iter(made())) if late else made()


def test_a_sample_that_is_longer_than_every_hint_has_a_shape_too() -> None:
    """Also where a batch may have fewer samples than tokens."""
    lengths, budget = [4] * 30 + [50], TokenBudget(64, max_samples=8)
    how: Any = {"length_hint": [4] * 31, "shapes": 2, "weigh": "samples", "collate_fn": collate}
    steps = [step for step in OnlineDataLoader(Tokens(lengths), budget, **how) if not step.idle]
    assert {tuple(step.batch["input_ids"].shape) for step in steps} == {(8, 4), (1, 64)}


def test_a_loader_is_let_go_of_at_once_and_one_whose_budget_has_no_limit_is_refused_at_once() -> (
    None
):
    """In a circle of objects its workers would take five seconds each to end."""
    loader = make_loader(
        None, LENGTHS, samples_per_update=16, num_workers=1, persistent_workers=True
    )
    list(islice(loader, 2))
    left = weakref.ref(loader)
    del loader
    assert left() is None
    for budget in (
        MemoryBudget(2, model=PaddedTokens()),
        TokenBudget(900) & MemoryBudget(2, model=PaddedTokens()),
    ):
        with pytest.raises(ConfigError, match="longest=tokens of the longest sample"):
            OnlineDataLoader(Tokens(LENGTHS), budget, collate_fn=collate)
    known = MemoryBudget(2, longest=64, model=PaddedTokens())
    assert (
        sum(
            len(step.indices)
            for step in OnlineDataLoader(Tokens(LENGTHS), known, collate_fn=collate)
        )
        == 60
    )


@pytest.mark.parametrize(
    "options", [{"drop_last": True, "samples_per_update": 16}, {"sampler": list(range(0, 60, 2))}]
)
def test_lengths_of_the_samples_in_use_are_enough(options: dict[str, Any]) -> None:
    """In a fixed order the last samples never come: the others' lengths plan the next epoch all the same."""

    def run(world: Any) -> list[int]:
        loader = make_loader(world, LENGTHS, **options)
        return [
            sum(step.batch["input_ids"].numel() for step in loader if not step.idle)
            for _ in range(2)
        ]

    padded = np.sum(run_ranks(2, run), axis=0)
    assert padded[1] < padded[0], "batches of known lengths are matched"


@pytest.mark.parametrize("name", ["sampler", "batch_sampler"])
def test_a_state_of_another_order_is_refused(name: str) -> None:
    """Taken over, it would lose samples and repeat others."""
    order: list[Any] = (
        list(range(60)) if name == "sampler" else [[2 * i, 2 * i + 1] for i in range(30)]
    )
    loader = make_loader(None, LENGTHS, **{name: order})
    came = [i for step in islice(loader, 3) for i in used(step)]
    state = json.loads(json.dumps(loader.state_dict()))
    with pytest.raises(StateError, match=f"`{name}` must give the same indices in epoch 0"):
        make_loader(None, LENGTHS, **{name: order[::-1]}).load_state_dict(state)
    same = make_loader(None, LENGTHS, **{name: order})
    same.load_state_dict(state)
    assert sorted(came + [i for step in same for i in used(step)]) == list(range(60))


def stopped(loader: Any, count: int = 1) -> Any:
    for _ in islice(loader, count):
        pass
    return loader.state_dict()


class Gone(Tokens):
    def __getitem__(self, index: int) -> Any:
        raise OSError("the disk is gone")


def test_a_rank_takes_no_other_ranks_state_and_one_that_cannot_load_again_tells_the_others() -> (
    None
):
    """Also where the epoch's last steps were agreed, so that resumed ranks ask each other whether that is still the end."""
    states = run_ranks(2, lambda world: stopped(make_loader(world, LENGTHS)))
    assert states[0]["running"]["ended"]

    def load(world: Any) -> None:
        with pytest.raises(
            StateError, match=rf"this is rank {world.rank} of 2, .* ranks \[{1 - world.rank}\] of 2"
        ):
            make_loader(world, LENGTHS).load_state_dict(states[1 - world.rank])
        loader = make_loader(world, LENGTHS, dataset=Gone if world.rank else Tokens)
        loader.load_state_dict(states[world.rank])
        with pytest.raises(
            RuntimeError if world.rank else AlignmentError, match="the disk is gone"
        ):
            list(loader)

    def rest(world: Any, own: bool) -> list[Any]:
        late = SimpleNamespace(rank=0, size=1, all_max=world.all_max, all_sum=world.all_sum)
        loader = make_loader(world if own else late, LENGTHS)
        loader.load_state_dict(states[world.rank] if own else states)
        late.rank, late.size = (
            world.rank,
            world.size,
        )  # as if init_process_group came after the states were loaded
        return list(loader)

    run_ranks(2, load)
    late, usual = (
        all_ids(run_ranks(2, lambda world, own=own: rest(world, own))) for own in (False, True)
    )
    assert late == usual
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
    loader, came = make_loader(world, LENGTHS, dataset=data, **how), []
    loader.load_state_dict(states) if states else None
    with contextlib.suppress(*fails):
        for step in islice(loader, stop):
            came += used(step)
    return came, json.loads(json.dumps(loader.state_dict()))


@pytest.mark.parametrize(
    "how", [{"samples_per_update": 30}, {"accumulation": 5, "window": 8}, {"window": 8}]
)
@pytest.mark.parametrize("gone", [[(0,)], [(0, 1), (1,)]])
def test_a_resume_that_fails_before_its_first_step_leaves_the_state_as_it_was(
    how: Any, gone: Any
) -> None:
    """Fails once or twice, on some ranks, within an update; then all samples come, on as many ranks or on others."""
    for ranks in (1, 2):
        came, states = zip(
            *run_ranks(2, lambda world: leg(world, None, stop=3, **how)), strict=True
        )
        for failing in gone:
            before = states
            nothing, states = zip(
                *run_ranks(2, lambda w, now=failing: leg(w, before, now, **how)),  # noqa: B023
                strict=True,  # noqa: B023
            )
            assert (nothing, states) == (([], []), before)
        rest = [
            samples
            for samples, _ in run_ranks(ranks, lambda world: leg(world, [*states], **how))  # noqa: B023
        ]
        assert sorted(i for samples in (*came, *rest) for i in samples) == list(range(60))
    with pytest.raises(StateError, match="run one step before saving again"):
        leg(SingleProcess(), [*states], gone=(0,), **how)


@pytest.mark.parametrize("how", [{"samples_per_update": 30}, {}])
def test_an_epoch_that_fails_as_it_begins_is_not_used_up(how: Any) -> None:
    """One rank has stopped between two epochs, so the other loses contact as the next one begins."""

    def run(world: Any, states: Any, epochs: int) -> tuple[list[list[int]], Any]:
        loader, came = (
            make_loader(SimpleNamespace(**{n: getattr(world, n) for n in WORLD}), LENGTHS, **how),
            [[], []],
        )
        loader.load_state_dict(states) if states else None
        with contextlib.suppress(AlignmentError):
            for epoch in range(loader.epoch, epochs):
                if epoch and not states:
                    loader.world.all_max = lost
                came[epoch] += [i for step in loader for i in used(step)]
        return came, json.loads(json.dumps(loader.state_dict()))

    begun = run_ranks(2, lambda world: run(world, None, 2 - world.rank))
    for ranks in (1, 2):
        rest = run_ranks(ranks, lambda world: run(world, [state for _, state in begun], 2))
        for epoch in (0, 1):
            assert sorted(i for came, _ in (*begun, *rest) for i in came[epoch]) == list(range(60))


WORLD = ("rank", "size", "all_max", "all_sum")


def lost(values: Any) -> Any:
    raise AlignmentError("lost contact")


@pytest.mark.parametrize("call", range(12))
@pytest.mark.parametrize("how", [{"window": 4, "accumulation": 2}, {"samples_per_update": 9}])
def test_a_rank_that_was_interrupted_between_two_steps_has_no_state_once_its_epoch_has_begun(
    call: int, how: Any
) -> None:
    """Rank 0 as one of its exchanges returns; rank 1 knows by then what was agreed, and fails in its next one."""

    def interrupted(world: Any) -> Any:
        calls, came = count(), list[int]()

        def exchange(name: str) -> Any:
            def call_of(values: Any) -> Any:
                number = next(calls)
                if world.rank and number > call:
                    raise KeyboardInterrupt
                found = getattr(world, name)(values)
                if not world.rank and number == call:
                    raise KeyboardInterrupt
                return found

            return call_of

        own = SimpleNamespace(
            rank=world.rank, size=2, all_max=exchange("all_max"), all_sum=exchange("all_sum")
        )
        loader = make_loader(own, LENGTHS, **how)
        saved = loader.state_dict()
        is_over = True
        try:
            for step in loader:
                came += used(step)
                saved = loader.state_dict()
        except KeyboardInterrupt:
            is_over = False
        if came and not is_over:
            with pytest.raises(StateError, match="interrupted between two steps.*after a step"):
                loader.state_dict()
        return came, json.loads(json.dumps(saved))

    came, states = zip(*run_ranks(2, interrupted), strict=True)
    if len({state["cursor"]["steps"] for state in states}) > 1:
        with pytest.raises(StateError, match="after different steps"):
            make_loader(SingleProcess(), LENGTHS, **how).load_state_dict(states)
        return
    rest = run_ranks(2, lambda world: leg(world, states[world.rank], fails=(), **how)[0])
    if {state["epoch"] for state in states} == {0}:
        came = (*came, *rest)
    assert sorted(sum(came, [])) == list(range(len(LENGTHS)))


def few_fail(samples: Any) -> Any:
    if len(samples) < 6 and len(samples[0]["input_ids"]) == 1:
        raise ValueError("statistics need six samples")
    return collate(samples)


def rounded(samples: Any) -> Any:
    batch = collate(samples)
    return {
        n: torch.nn.functional.pad(v, (0, -v.shape[1] % 8), value=-100) for n, v in batch.items()
    }


def fivefold(samples: Any) -> Any:
    """Makes five tokens of each token of the samples that rank 0 gets first."""
    grown = [{k: v.repeat(5) if len(v) < 4 else v for k, v in s.items()} for s in samples]
    return collate(grown)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("how", [{"window": 12}, {"samples_per_update": 24}])
@pytest.mark.filterwarnings("ignore:`collate_fn` made a batch of:UserWarning")
def test_batches_that_are_cut_again_fit_on_every_rank_with_equal_steps_also_after_a_resume(
    how: Any, num_workers: int
) -> None:
    lengths = [3] * 12 + [10] * 12
    how = {"max_tokens": 40, "collate_fn": fivefold, "num_workers": num_workers, **how}

    def rest(world: Any, states: Any, stop: int | None) -> Any:
        loader = make_loader(world, lengths, **how)
        loader.load_state_dict(states) if states else None
        steps = list(islice(loader, stop))
        assert all(step.batch["input_ids"].numel() <= 40 for step in steps)
        came = [index for step in steps for index in used(step)]
        return came, len(steps), json.loads(json.dumps(loader.state_dict()))

    before = run_ranks(2, lambda world: rest(world, None, 3))
    after = run_ranks(2, lambda world: rest(world, [state for *_, state in before], None))
    assert sorted(sum((came for came, *_ in [*before, *after]), [])) == list(range(24))
    assert after[0][1] == after[1][1]


@pytest.mark.parametrize("how", [{"window": 12}, {"samples_per_update": 24}])
def test_a_batch_that_fails_as_it_is_split_reaches_every_rank_and_stays_in_the_state(
    how: Any,
) -> None:
    """Rank 0 has one batch of short samples, rank 1 has twelve batches; so rank 0 splits its own, for equal steps."""
    how |= {"max_tokens": 20, "length_of": lambda sample: len(sample["input_ids"])}
    how |= {"data": lambda _: Tokens([1] * 12 + [20] * 12)}
    states = [
        state
        for _, state in run_ranks(2, lambda world: leg(world, None, collate_fn=few_fail, **how))
    ]
    rest = [samples for samples, _ in run_ranks(2, lambda world: leg(world, states, **how))]
    assert sorted(sum(rest, [])) == list(range(24))


@pytest.mark.parametrize("how", [{"window": 6}, {"samples_per_update": 12}])
@pytest.mark.filterwarnings("ignore:`collate_fn` made a batch of:UserWarning")
def test_a_part_that_is_padded_further_than_measured_is_yielded(how: Any) -> None:
    """The batch ends at a multiple of 8, its last part does not."""
    how |= {"max_tokens": 48, "length_of": None, "collate_fn": rounded}
    how |= {"data": lambda _: Tokens([8] + [5] * 5 + [40] * 6)}
    came = [samples for samples, _ in run_ranks(2, lambda world: leg(world, None, **how))]
    assert sorted(sum(came, [])) == list(range(12))


def test_schedules_that_differ_are_refused_and_a_size_where_there_is_none() -> None:
    with pytest.raises(AlignmentError, match=r"ranks have unequal .*sizes of updates"):
        run_ranks(
            2,
            lambda world: list(
                make_loader(world, LENGTHS, samples_per_update=lambda *_: 4 + world.rank)
            ),
        )
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
    data, strange = (
        Faulty(lengths_of(2000 if fault == "starts_over" else 200, seed=3)),
        world.rank == 1,
    )
    data.fault = fault
    options: dict[str, Any] = {"num_workers": 2} if fault == "worker_dies" else {}
    if strange:
        options |= {"seed": 5} if fault == "other_seed" else {}
    loader = make_loader(world, [], dataset=lambda _: data, window=8, **options)
    try:
        list(islice(loader, 3 if fault == "starts_over" and strange else None))
        list(loader)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "ended"


@pytest.mark.filterwarnings("ignore:epoch 0 was left")
@pytest.mark.parametrize(
    ("fault", "of_faulty", "of_others"),
    [
        (
            "item_raises",
            r"samples \[77\] failed: KeyError",
            r"rank . failed while it loaded data: .*samples \[77\]",
        ),
        ("worker_dies", "worker", "rank . failed while it loaded data: .*[Ww]orker"),
        ("other_seed", "ranks have unequal seed", "ranks have unequal seed"),
        ("starts_over", "different points", "different points"),
    ],
)
def test_a_fault_reaches_every_rank(fault: str, of_faulty: str, of_others: str) -> None:
    texts = run_ranks(3, lambda world: text_of(world, fault))
    assert sum(bool(re.search(of_others, text, re.S)) for text in texts) >= 2, texts
    assert all(re.search(f"{of_faulty}|{of_others}", text, re.S) for text in texts), texts
