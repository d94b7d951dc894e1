"""The table of laws: every loader of :mod:`tests.laws.loaders`, on one rank and on several, padded and packed, keeps each."""

import copy
import itertools
from collections import Counter
from dataclasses import dataclass, replace
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
from tests.laws.loader_laws import as_json, assert_loader_laws, assert_resumes_exactly
from tests.laws.loaders import ENTRIES, LENGTHS, MOST_EDGES, TOKENS, Entry, graph_of
from tests.online.helpers import Tokens, collate, lengths_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:there are too few samples", "ignore:.*does not fit the budget even alone"
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


def chosen(kind: Any, lengths: Any, budget: Any, *args: Any, **options: Any) -> Any:
    if type(budget) is not TokenBudget:
        return kind(lengths, budget, *args, **options)
    key = repr((kind, np.asarray(lengths).tolist(), budget.fingerprint, args, options))
    if key not in CHOSEN:
        CHOSEN[key] = kind(lengths, budget, *args, **options)
    return CHOSEN[key]


@pytest.fixture(params=ENTRIES)
def entry(request: pytest.FixtureRequest) -> Entry:
    return ENTRIES[request.param]


def facts_of(step: Any) -> list[Any]:
    """All that a step is, but for its batch."""
    weights = [step.samples, step.weight, step.loss_scale]
    return [*used_by(step), *weights, step.ends_update, step.idle]


def used_by(step: Any) -> list[int]:
    """Indices of the samples that a step uses: an idle one computes a loss of weight 0 with a sample of another step."""
    return [] if step.idle else list(step.indices)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_sample_once_in_equal_steps_that_add_up(
    entry: Entry, layout: str, ranks: int
) -> None:
    """And in steps of one kind (law 10), where kinds are told apart."""
    kinds = {name: value for name, value in entry.base.items() if name in ("kinds", "one_kind")}

    def make(world: Any) -> Any:
        return entry.make(world, layout, **entry.base)

    assert_loader_laws(make, len(LENGTHS), world_size=ranks, epochs=2, resume_at=(), **kinds)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_batches_fit_and_come_again(entry: Entry, layout: str, ranks: int) -> None:
    def run(world: Any) -> list[Any]:
        return list(entry.make(world, layout, **entry.base))

    first = list(itertools.chain.from_iterable(run_ranks(ranks, run)))
    second = list(itertools.chain.from_iterable(run_ranks(ranks, run)))
    assert list(map(facts_of, first)) == list(map(facts_of, second))
    has_edges = isinstance(entry.base.get("lengths"), dict)
    for step in first:
        lengths = [LENGTHS[i] for i in step.indices]
        if len(lengths) == 1:
            continue
        tokens = sum(lengths) if layout == "packed" else len(lengths) * max(lengths)
        assert tokens <= TOKENS
        if has_edges:
            assert sum(graph_of(length)["edges"] for length in lengths) <= MOST_EDGES


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
        steps = list(islice(loader, stop))
        if stop is None:
            steps += loader  # one more epoch
        shapes = [tuple(step.batch["input_ids"].shape) for step in steps]
        shapes += [tuple(step.batch["labels"].shape) for step in steps]
        return shapes, loader.state_dict()

    first = run_ranks(ranks, lambda world: run(world, 4, None))
    states = [state for _, state in first]
    rest = run_ranks(resumed, lambda world: run(world, None, states))
    shapes = set(itertools.chain.from_iterable(shapes for shapes, _ in [*first, *rest]))
    fewest = 2 if layout == "padded" else 1
    assert fewest <= len(shapes) <= entry.base["shapes"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_gradients_are_those_of_one_batch(entry: Entry, ranks: int) -> None:
    """Law 5, exactly: the loss of a batch is a mean over its units (label tokens, or samples), so what a sample adds to the
    averaged gradient is its units times the batch's loss scale, over the batch's units and the number of ranks."""
    units = [length - 1 for length in LENGTHS]
    if entry.make is loaders.sampler:
        units = [1] * len(LENGTHS)

    def run(world: Any) -> list[list[Any]]:
        return list(entry.make(world, **entry.base).updates())

    for parts in zip(*run_ranks(ranks, run), strict=True):
        steps = [step for part in parts for step in part if not step.idle]
        units_of_steps = [sum(units[index] for index in step.indices) for step in steps]
        total = sum(units_of_steps)
        for step, units_of_step in zip(steps, units_of_steps, strict=True):
            assert step.loss_scale / ranks * total == pytest.approx(units_of_step, rel=1e-12)


@pytest.mark.parametrize(("ranks", "resumed", "layout", "epoch"), PLACES)
def test_a_run_goes_on_from_every_step(
    entry: Entry, ranks: int, resumed: int, layout: str, epoch: int
) -> None:
    """On as many ranks to the last bit; on others with the samples that remained. Later, lengths are known to all."""
    if not entry.moves:
        pytest.skip("a stream is read on")

    def make_anew(world: Any) -> Any:
        return entry.make(world, layout, **entry.base)

    def make(world: Any) -> Any:
        loader = make_anew(world)
        for _ in range(epoch):
            assert list(loader)
        return loader

    assert_resumes_exactly(
        make,
        world_size=ranks,
        resume_world_size=resumed,
        indices_of=facts_of if ranks == resumed else used_by,
        make_anew=make_anew,
    )


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
        return list(islice(loader, stop)), as_json(loader.state_dict())

    for stop in (1, 2, 4):
        first = run_ranks(ranks, partial(some, stop=stop, states=None))
        states = [state for _, state in first]
        rest = run_ranks(resumed, partial(some, stop=None, states=states))
        before = rows_of(first)
        after = rows_of(rest)
        ended = max((n for n, row in enumerate(before, 1) if row[0].ends_update), default=0)
        ends = next(n for n, row in enumerate(after, 1) if row[0].ends_update)
        begun = list(itertools.chain.from_iterable(before[ended:]))
        finished = list(itertools.chain.from_iterable(after[:ends]))
        samples = sum(step.samples.local for step in begun + finished)
        weight = sum(step.weight.local for step in begun + finished)
        for step in begun + finished:
            assert step.samples.total == samples
            assert step.weight.total == weight
        for step in finished:
            assert step.loss_scale * weight == pytest.approx(step.weight.local * resumed)


def rows_of(ranks: list[tuple[list[Any], Any]]) -> list[tuple[Any, ...]]:
    """The steps of a run, each with its batches on all ranks."""
    return list(zip(*(steps for steps, _ in ranks), strict=True))


def alone(entry: Entry, steps: int, **settings: Any) -> Any:
    """The loader of one rank, after a few steps."""
    layout = settings.pop("layout", "padded")
    world = ThreadWorld(0, 1, None, [])  # type: ignore[arg-type]
    loader = entry.make(world, layout, **{**entry.base, **settings})
    for _ in islice(loader, steps):
        pass
    return loader


def test_a_state_of_every_other_setting_is_refused(entry: Entry) -> None:
    """And half of nothing is taken over."""
    state = as_json(alone(entry, 2).state_dict())
    for name, value in entry.others.items():
        settings = {name: value}
        if name == "sampler":
            settings["shuffle"] = False
        other = alone(entry, 1, **settings)
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(StateError):
            other.load_state_dict(state)
        assert other.state_dict() == before, f"a state of another {name} has changed the loader"
    alone(entry, 1).load_state_dict(state)


def test_what_is_no_state_or_a_damaged_one_is_refused(entry: Entry) -> None:
    """Each of its fields changed, or gone."""
    loader = alone(entry, 3)
    state = as_json(loader.state_dict())
    before = copy.deepcopy(loader.state_dict())
    changed = [{**state, key: "x"} for key in state]
    lacking = [{name: state[name] for name in state if name != key} for key in state]
    for broken in (None, 3, "state", [], {}, [None], [{}], *changed, *lacking):
        with pytest.raises(StateError):
            loader.load_state_dict(broken)
    assert loader.state_dict() == before


def loses(step):
    samples = Share(len(step.indices) - 1, step.samples.total)
    return replace(step, indices=step.indices[1:], samples=samples)


def weighs_alike(step):
    return step if step.idle else replace(step, loss_scale=1.0)


class Broken(PlannedDataLoader):
    uneven = False
    forgets = False

    def changed(self, step):
        return step

    def _run(self, send):
        steps = [self.changed(step) for step in super()._run(send)]
        if self.uneven and self.world.rank == 0:
            del steps[0]
        yield from steps

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
    faulty = type("Faulty", (Broken,), fault)
    data = Tokens(MORE)

    def make(world):
        return faulty(
            data, MORE, TokenBudget(96), samples_per_update=8, collate_fn=collate, world=world
        )

    with pytest.raises(AssertionError, match=message):
        assert_loader_laws(make)


DRAWN = np.random.default_rng(24).integers(1, 60, 23).tolist()


# Ranks, steps, and whether a limit is learned: of the parts of a run, each resumed from the part before.
PARTS = st.tuples(st.integers(1, 5), st.integers(1, 5), st.booleans())


@dataclass(frozen=True)
class Part:
    """A part of a run: the loader of ``kind`` on each of some ranks, for so many steps (None: to the end)."""

    kind: str
    settings: dict[str, Any]
    most: int
    layout: str
    steps: int | None
    learns: bool
    states: Any

    def run(self, world: Any) -> tuple[list[int], Any, list[Any]]:
        """Returns the samples that were used, the state, and the kinds of the batches."""
        budget = LearningBudget(TokenBudget(self.most, layout=self.layout))
        settings = {**self.settings, "max_tokens": lambda _layout: budget}
        loader = ENTRIES[self.kind].make(world, self.layout, **settings)
        if self.states is not None:
            loader.load_state_dict(self.states)
            self._learn(budget)
        used: list[int] = []
        kinds: list[Any] = []
        for number, step in enumerate(islice(loader, self.steps)):
            used += step.indices if self.kind.startswith("sampler") else used_by(step)
            if self.settings.get("kinds"):
                kinds.append(self.settings["kinds"][step.indices[0]])
            if number == 1:
                self._learn(budget)
        return used, as_json(loader.state_dict()), kinds

    def _learn(self, budget: LearningBudget) -> None:
        if self.learns:
            learned_at(budget, min(budget.limit, self.most) * 0.8)


def settings_for(kind: str, lengths: list[int], seed: int) -> dict[str, Any]:
    """Those of the entry, for other data."""
    settings = {"lengths": lengths, **ENTRIES[kind].base, "seed": seed}
    if kind.endswith("graphs"):
        settings["lengths"] = loaders.graphs_of(lengths)
    if "length_hint" in settings:
        settings["length_hint"] = lengths
    if "kinds" in settings:
        settings["kinds"] = loaders.kinds_of(len(lengths))
    return settings


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=8, max_size=40),
    most=st.integers(1, 150),
    kind=st.sampled_from([name for name, entry in ENTRIES.items() if entry.moves]),
    layout=st.sampled_from(["padded", "packed"]),
    seed=st.integers(0, 9),
    parts=st.lists(PARTS, min_size=3, max_size=3),
)
@example(
    lengths=DRAWN,
    most=1,
    kind="planned-free",
    layout="padded",
    seed=1,
    parts=[(2, 1, False), (5, 3, False), (1, 1, False)],
)
@example(
    lengths=DRAWN,
    most=150,
    kind="planned-free",
    layout="padded",
    seed=1,
    parts=[(2, 1, False), (2, 3, True), (1, 1, True)],
)
def test_a_state_is_taken_back_after_changes_of_ranks_and_of_what_was_learned(
    lengths, most, kind, layout, seed, parts
):
    """Repeats come beyond the epoch's samples, never instead of them. What is learned is applied when a state was loaded,
    and again while the epoch is under way."""
    uses: Counter[int] = Counter()
    states: Any = None
    is_sampler = kind.startswith("sampler")
    own_settings = settings_for(kind, lengths, seed)
    if "shapes" in own_settings:
        layout = "padded"
    for ranks, steps, learns in [*parts, (2, None, True)]:
        if len(uses) == len(lengths):
            break
        if is_sampler:
            ranks = min(ranks, own_settings.get("samples_per_update", 5))
        part = Part(kind, own_settings, most, layout, steps, learns, states)
        results = run_ranks(ranks, part.run)
        for used, _, _ in results:
            uses.update(used)
        states = [state for _, state, _ in results]
        if own_settings.get("one_kind") != "batch":
            assert len({tuple(kinds) for _, _, kinds in results}) == 1, "law 10"
    assert set(uses) == set(range(len(lengths)))
    assert is_sampler or uses.total() == len(lengths)


def learned_at(budget: LearningBudget, cost: float) -> None:
    budget.record_failed_cost(cost)
    budget.apply()


def sampler_of(lengths: Any, budget: Any, *, ranks: int = 1, shuffle: bool = False) -> Any:
    return LengthAwareBatchSampler(lengths, budget, shuffle=shuffle, rank=0, world_size=ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sampler_follows_a_limit_that_was_applied_before_its_epoch(ranks: int) -> None:
    budget = LearningBudget(TokenBudget(1000))
    sampler = sampler_of(np.full(64, 100), budget, ranks=ranks, shuffle=True)
    assert max(map(len, sampler)) == 10
    learned_at(budget, 600)
    assert max(map(len, sampler)) == 5


def test_a_state_with_learned_limits_is_refused_by_a_budget_that_does_not_learn() -> None:
    lengths = range(10, 74)
    budget = LearningBudget(TokenBudget(400))
    saved = sampler_of(lengths, budget)
    learned_at(budget, 200)
    assert len(list(islice(saved, 2))) == 2
    other = sampler_of(lengths, TokenBudget(400))
    with pytest.raises(StateError, match="was saved with limits of a LearningBudget"):
        other.load_state_dict(saved.state_dict())
    untouched = sampler_of(lengths, TokenBudget(400))
    assert list(other) == list(untouched)


LEAVES_OUT_OTHERS = r"leave out other samples .* call set_epoch with the next"


def drops(make: Any, budget: LearningBudget) -> Any:
    """A shuffled loader that leaves out what does not fit."""
    return make(
        SingleProcess(),
        lengths=list(range(10, 74)),
        max_tokens=lambda _layout: budget,
        oversize="drop",
        shuffle=True,
    )


@pytest.mark.parametrize("make", [loaders.sampler, loaders.planned])
def test_a_state_is_refused_if_a_limit_learned_in_its_epoch_leaves_out_other_samples(make) -> None:
    budget = LearningBudget(TokenBudget(400))
    saved = drops(make, budget)
    for number, _step in enumerate(saved):
        if number == 1:
            learned_at(budget, 60)
        if number == 2:
            break
    other = drops(make, LearningBudget(TokenBudget(400)))
    with pytest.raises(StateError, match=LEAVES_OUT_OTHERS):
        other.load_state_dict(saved.state_dict())


@pytest.mark.parametrize("make", [loaders.sampler, loaders.planned])
def test_a_limit_learned_after_a_state_was_loaded_waits_for_the_next_epoch(make) -> None:
    saved = drops(make, LearningBudget(TokenBudget(400)))
    assert len(list(islice(saved, 3))) == 3
    budget = LearningBudget(TokenBudget(400))
    other = drops(make, budget)
    other.load_state_dict(saved.state_dict())
    learned_at(budget, 60)
    with pytest.raises(StateError, match=LEAVES_OUT_OTHERS):
        list(other)
    if make is loaders.planned:
        other.set_epoch(1)
        used = itertools.chain.from_iterable(step.indices for step in other)
        assert set(used) == set(range(45))  # lengths up to 0.9 * 60
