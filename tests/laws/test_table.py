"""The table of laws: every loader of :mod:`tests.laws.loaders`, on one rank and on several, padded and packed, keeps each."""

import copy
import itertools
import json
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dynagroup import (
    LearningBudget,
    LengthAwareBatchSampler,
    PlannedDataLoader,
    Share,
    StateError,
    TokenBudget,
)
from dynagroup.distributed import SingleProcess
from dynagroup.plan import few_shapes
from dynagroup.testing import ThreadWorld, run_ranks
from tests.laws import loaders
from tests.laws.loader_laws import assert_loader_laws, assert_resumes_exactly
from tests.laws.loaders import ENTRIES, LENGTHS, MOST_EDGES, TOKENS, Entry, graph_of
from tests.online.helpers import Tokens, collate, lengths_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:there are too few samples", "ignore:.*do not fit the budget even alone"
)
PLACES: Any = [
    (1, 1, "padded", 0),
    (3, 2, "padded", 0),
    (2, 2, "packed", 0),
    (2, 3, "packed", 0),
    (2, 2, "padded", 1),
]
LATER = [(2, 2, "padded", 0), (1, 3, "padded", 0), (2, 3, "padded", 1)]
PLACES += [pytest.param(*place, marks=pytest.mark.slow) for place in LATER]
LAYOUTS = ["padded", "packed"]
MORE = lengths_of(30, seed=1)
CHOSEN: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def shapes_are_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by each of thousands of loaders; those of budgets that learn are chosen anew."""
    for kind in (few_shapes.PackedTotals, few_shapes.ShapeLadder):
        monkeypatch.setattr(few_shapes, kind.__name__, partial(chosen, kind))


def chosen(kind: Any, lengths: Any, budget: Any, *args: Any, **how: Any) -> Any:
    if type(budget) is not TokenBudget:
        return kind(lengths, budget, *args, **how)
    key = repr((kind, np.asarray(lengths).tolist(), budget.fingerprint, args, how))
    if key not in CHOSEN:
        CHOSEN[key] = kind(lengths, budget, *args, **how)
    return CHOSEN[key]


@pytest.fixture(params=ENTRIES)
def entry(request: pytest.FixtureRequest) -> Entry:
    return ENTRIES[request.param]


def facts_of(step: Any) -> list[Any]:
    """All that a step is, but for its batch."""
    own = [] if step.idle else list(step.indices)
    return [*own, step.samples, step.weight, step.loss_scale, step.ends_update, step.idle]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_sample_once_in_equal_steps_that_add_up(
    entry: Entry, layout: str, ranks: int
) -> None:
    """And in steps of one kind (law 10), where kinds are told apart."""
    kinds = {name: value for name, value in entry.base.items() if name in ("kinds", "one_kind")}
    make = lambda world: entry.make(world, layout, **entry.base)  # noqa: E731
    assert_loader_laws(make, len(LENGTHS), world_size=ranks, epochs=2, resume_at=(), **kinds)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_batches_fit_and_come_again(entry: Entry, layout: str, ranks: int) -> None:
    def run(world: Any) -> list[Any]:
        return list(entry.make(world, layout, **entry.base))

    found, again = run_ranks(ranks, run), run_ranks(ranks, run)
    assert [[facts_of(step) for step in steps] for steps in found] == [
        [facts_of(s) for s in steps] for steps in again
    ]
    for step in itertools.chain.from_iterable(found):
        lengths = [LENGTHS[i] for i in step.indices]
        assert (
            sum(lengths) if layout == "packed" else len(lengths) * max(lengths)
        ) <= TOKENS or len(lengths) == 1
        edges = sum(graph_of(length)["edges"] for length in lengths)
        assert (
            not isinstance(entry.base.get("lengths"), dict)
            or edges <= MOST_EDGES
            or len(lengths) == 1
        )


@pytest.mark.parametrize(
    ("ranks", "resumed", "layout"), [(1, 3, "padded"), (3, 2, "padded"), (3, 2, "packed")]
)
def test_a_model_meets_few_shapes(entry: Entry, ranks: int, resumed: int, layout: str) -> None:
    """Law 11: over epochs, ranks and resumes, idle steps included."""
    if "shapes" not in entry.base:
        pytest.skip("batches have any shape")

    def run(world: Any, stop: int | None, states: Any) -> tuple[list[Any], Any]:
        loader = entry.make(world, layout, **entry.base)
        if states is not None:
            loader.load_state_dict(states)
        steps = [*islice(loader, stop), *(loader if stop is None else ())]
        return [
            tuple(s.batch[name].shape) for s in steps for name in ("input_ids", "labels")
        ], loader.state_dict()

    first = run_ranks(ranks, lambda world: run(world, 4, None))
    rest = run_ranks(resumed, lambda world: run(world, None, [state for _, state in first]))
    met = {shape for shapes, _ in (*first, *rest) for shape in shapes}
    assert (layout == "padded") < len(met) <= entry.base["shapes"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_gradients_are_those_of_one_batch(entry: Entry, ranks: int) -> None:
    """Law 5, exactly: the loss of a batch is a mean over its units (label tokens, or samples), so what a sample adds to the
    averaged gradient is its units times the batch's loss scale, over the batch's units and the number of ranks."""
    units = {
        index: 1 if entry.make.__name__ == "sampler" else length - 1
        for index, length in enumerate(LENGTHS)
    }

    def run(world: Any) -> list[list[Any]]:
        return list(entry.make(world, **entry.base).updates())

    for parts in zip(*run_ranks(ranks, run), strict=True):
        steps = [step for part in parts for step in part if not step.idle]
        total = sum(units[index] for step in steps for index in step.indices)
        for step in steps:
            own = sum(units[index] for index in step.indices)
            assert step.loss_scale / ranks * total == pytest.approx(own, rel=1e-12)


@pytest.mark.parametrize(("ranks", "resumed", "layout", "epoch"), PLACES)
def test_a_run_goes_on_from_every_step(
    entry: Entry, ranks: int, resumed: int, layout: str, epoch: int
) -> None:
    """On as many ranks to the last bit; on others with the samples that remained. Later, lengths are known to all."""
    if not entry.moves:
        pytest.skip("a stream is read on")

    def make(world: Any) -> Any:
        loader = entry.make(world, layout, **entry.base)
        for _ in range(epoch):
            assert list(loader)
        return loader

    indices_of = facts_of if ranks == resumed else lambda step: [] if step.idle else step.indices
    assert_resumes_exactly(make, world_size=ranks, resume_world_size=resumed, indices_of=indices_of)


@pytest.mark.parametrize(("ranks", "resumed"), [(1, 3), (3, 2)])
def test_an_update_begun_on_other_ranks_is_finished_as_one(
    entry: Entry, ranks: int, resumed: int
) -> None:
    """Its totals are those of the whole update, so that the gradients summed before and after the stop add up."""
    if "samples_per_update" not in entry.base:
        pytest.skip("updates are as they come")

    def some(world: Any, stop: int | None, states: Any) -> Any:
        loader = entry.make(world, max_tokens=25, **entry.base)
        if states is not None:
            loader.load_state_dict(states)
        return [*islice(loader, stop)], json.loads(json.dumps(loader.state_dict()))

    for stop in (1, 2, 4):
        first = run_ranks(ranks, lambda world, k=stop: some(world, k, None))
        rest = run_ranks(
            resumed, lambda world, s=[state for _, state in first]: some(world, None, s)
        )
        before = list(zip(*(steps for steps, _ in first), strict=True))
        after = list(zip(*(steps for steps, _ in rest), strict=True))
        begun = stop - max(
            (n for n, row in enumerate(before, start=1) if row[0].ends_update), default=0
        )
        left = next(n for n, row in enumerate(after, start=1) if row[0].ends_update)
        update = [step for row in before[len(before) - begun :] + after[:left] for step in row]
        weight = sum(step.weight.local for step in update)
        assert {step.samples.total for step in update} == {
            sum(step.samples.local for step in update)
        }
        assert {step.weight.total for step in update} == {weight}
        scales = [step.loss_scale * weight for row in after[:left] for step in row]
        assert scales == pytest.approx(
            [step.weight.local * resumed for row in after[:left] for step in row]
        )


def alone(entry: Entry, steps: int, **settings: Any) -> Any:
    """The loader of one rank, after a few steps."""
    layout = settings.pop("layout", "padded")
    loader = entry.make(ThreadWorld(0, 1, None, []), layout, **{**entry.base, **settings})  # type: ignore[arg-type]
    for _ in islice(loader, steps):
        pass
    return loader


def test_a_state_of_every_other_setting_is_refused(entry: Entry) -> None:
    """And half of nothing is taken over."""
    state = json.loads(json.dumps(alone(entry, 2).state_dict()))
    for name, value in entry.others.items():
        other = alone(
            entry, 1, **({name: value} if name != "sampler" else {name: value, "shuffle": False})
        )
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(StateError):
            other.load_state_dict(state)
        assert other.state_dict() == before, f"a state of another {name} has changed the loader"
    alone(entry, 1).load_state_dict(state)


def test_what_is_no_state_or_a_damaged_one_is_refused(entry: Entry) -> None:
    """Each of its fields changed, or gone."""
    loader = alone(entry, 3)
    state = json.loads(json.dumps(loader.state_dict()))
    before = copy.deepcopy(loader.state_dict())
    damaged = [{**state, key: "x"} for key in state] + [{**state} for _ in state]
    for key, without in zip(state, damaged[len(state) :], strict=True):
        del without[key]
    for broken in (None, 3, "state", [], {}, [None], [{}], *damaged):
        with pytest.raises(StateError):
            loader.load_state_dict(broken)
    assert loader.state_dict() == before


def loses(step):
    return replace(
        step, indices=step.indices[1:], samples=Share(len(step.indices) - 1, step.samples.total)
    )


def weighs_alike(step):
    return step if step.idle else replace(step, loss_scale=1.0)


class Broken(PlannedDataLoader):
    changed, uneven, forgets = staticmethod(lambda step: step), False, False

    def _run(self, send):
        steps = [self.changed(step) for step in super()._run(send)]
        yield from steps[1:] if self.uneven and not self.world.rank else steps

    def load_state_dict(self, state_dict):
        if not self.forgets:
            super().load_state_dict(state_dict)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"changed": staticmethod(loses)}, "an update has [0-9]+ samples, but says 8"),
        ({"changed": staticmethod(weighs_alike)}, "`loss_scale` 1.0 is not"),
        ({"uneven": True}, "ranks take unequal steps in epoch 0"),
        ({"forgets": True}, "resumed after 1 steps, the epoch gives other batches"),
    ],
)
def test_broken_loaders_are_found(fault, message):
    kind, how = type("Faulty", (Broken,), fault), {"samples_per_update": 8, "collate_fn": collate}
    with pytest.raises(AssertionError, match=message):
        assert_loader_laws(
            lambda world: kind(Tokens(MORE), MORE, TokenBudget(96), world=world, **how)
        )


DRAWN = np.random.default_rng(24).integers(1, 60, 23).tolist()


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=8, max_size=40),
    most=st.integers(1, 150),
    kind=st.sampled_from([name for name, entry in ENTRIES.items() if entry.moves]),
    layout=st.sampled_from(["padded", "packed"]),
    seed=st.integers(0, 9),
    chain=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 5), st.booleans()), min_size=3, max_size=3
    ),
)
@example(
    lengths=DRAWN,
    most=1,
    kind="planned-free",
    layout="padded",
    seed=1,
    chain=[(2, 1, 0), (5, 3, 0), (1, 1, 0)],
)
@example(
    lengths=DRAWN,
    most=150,
    kind="planned-free",
    layout="padded",
    seed=1,
    chain=[(2, 1, 0), (2, 3, 1), (1, 1, 1)],
)
def test_a_state_is_taken_back_after_changes_of_ranks_and_of_what_was_learned(
    lengths, most, kind, layout, seed, chain
):
    """Repeats come beyond the epoch's samples, never instead of them. What is learned is applied when a state was loaded,
    and again while the epoch is under way."""
    emitted: Counter[int] = Counter()
    states: Any = None
    layout = "padded" if "shapes" in ENTRIES[kind].base else layout
    how = {"lengths": lengths, "max_tokens": most, **ENTRIES[kind].base, "seed": seed}
    how |= {"lengths": loaders.graphs_of(lengths)} if kind.endswith("graphs") else {}
    how |= {"length_hint": lengths} if "length_hint" in how else {}
    how |= {"kinds": loaders.kinds_of(len(lengths))} if "kinds" in how else {}
    for ranks, steps, learns in [*chain, (2, None, True)]:

        def run(
            world: Any, states: Any = states, steps: int | None = steps, learns: Any = learns
        ) -> tuple[Any, ...]:
            budget = LearningBudget(TokenBudget(most, layout=layout))

            def learn() -> None:
                if learns:
                    budget.record_failed_cost(min(budget.limit, most) * 0.8)
                    budget.apply()

            loader = ENTRIES[kind].make(
                world, layout, **{**how, "max_tokens": lambda _layout: budget}
            )
            if states is not None:
                loader.load_state_dict(states)
                learn()
            used, kinds = list[int](), list[Any]()
            for number, step in enumerate(islice(loader, steps)):
                used += step.indices if kind.startswith("sampler") or not step.idle else []
                kinds += [how["kinds"][step.indices[0]]] if how.get("kinds") else []
                if number == 1:
                    learn()
            return used, json.loads(json.dumps(loader.state_dict())), kinds

        if len(emitted) == len(lengths):
            break
        found = run_ranks(
            min(ranks, how.get("samples_per_update", 5)) if kind.startswith("sampler") else ranks,
            run,
        )
        emitted.update(index for used, _, _ in found for index in used)
        states = [state for _, state, _ in found]
        assert (
            how.get("one_kind") == "batch" or len({tuple(kinds) for _, _, kinds in found}) == 1
        ), "law 10"
    assert set(emitted) == set(range(len(lengths)))
    assert kind.startswith("sampler") or emitted.total() == len(lengths)


def learned_at(budget: LearningBudget, cost: float) -> None:
    budget.record_failed_cost(cost)
    budget.apply()


def test_a_sampler_follows_what_was_applied_before_and_forgets_it_with_no_other_budget() -> None:
    for ranks in (1, 2):
        budget = LearningBudget(TokenBudget(1000))
        made = LengthAwareBatchSampler(
            np.full(64, 100), budget, shuffle=True, rank=0, world_size=ranks
        )
        assert max(map(len, made)) == 10
        learned_at(budget, 600)
        assert max(map(len, made)) == 5
    budget = LearningBudget(TokenBudget(400))
    saved = LengthAwareBatchSampler(range(10, 74), budget, rank=0, world_size=1)
    learned_at(budget, 200)
    assert len(list(islice(saved, 2))) == 2
    state = saved.state_dict()
    other = LengthAwareBatchSampler(range(10, 74), TokenBudget(400), rank=0, world_size=1)
    with pytest.raises(StateError, match="was saved with limits of a LearningBudget"):
        other.load_state_dict(state)
    assert len(list(other)) == len(
        list(LengthAwareBatchSampler(range(10, 74), TokenBudget(400), rank=0, world_size=1))
    )


@pytest.mark.parametrize("kind", ["sampler", "planned"])
@pytest.mark.parametrize("when", ["before the state", "after it was loaded"])
def test_an_epoch_under_way_leaves_out_what_it_left_out_or_is_refused(kind: str, when: str) -> None:
    def made(budget: LearningBudget) -> Any:
        how: dict[str, Any] = {
            "lengths": list(range(10, 74)),
            "max_tokens": lambda _layout: budget,
            "oversize": "drop",
        }
        return (loaders.sampler if kind == "sampler" else loaders.planned)(
            SingleProcess(), **how, shuffle=True
        )

    budget, again = LearningBudget(TokenBudget(400)), LearningBudget(TokenBudget(400))
    loader, other = made(budget), made(again)
    for number, _step in enumerate(loader):
        if number == 1 and when == "before the state":
            learned_at(budget, 60)
        if number == 2:
            break
    state, said = loader.state_dict(), r"leave out other samples .* call set_epoch with the next"
    if when == "before the state":
        with pytest.raises(StateError, match=said):
            other.load_state_dict(state)
    else:
        other.load_state_dict(state)
        learned_at(again, 60)
        with pytest.raises(StateError, match=said):
            list(other)
    if when == "after it was loaded" and kind == "planned":
        other.set_epoch(1)
        assert {i for step in other for i in step.indices} == set(
            range(45)
        )  # lengths up to 0.9 * 60
