"""The table of laws: every loader, on one rank and on several, padded and packed, keeps each of them.

A loader takes part by an entry in :mod:`tests.laws.loaders`.
"""

import copy
import itertools
import json
from itertools import islice
from typing import Any

import pytest

from dynagroup import StateError
from dynagroup.testing import ThreadWorld, assert_loader_laws, assert_resumes_exactly, run_ranks
from tests.laws.loaders import ENTRIES, LENGTHS, MOST_EDGES, TOKENS, Entry, graph_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:too few samples for an equal number"),
    pytest.mark.filterwarnings("ignore:.*do not fit the budget even alone"),
]
WORLDS = [(1, 1, "padded"), (2, 2, "padded"), (3, 2, "padded"), (1, 3, "padded"), (2, 2, "packed"), (2, 3, "packed")]
PLACES = [*((*world, 0) for world in WORLDS), (2, 2, "padded", 1), (2, 3, "padded", 1)]
LAYOUTS = ["padded", "packed"]


@pytest.fixture(params=ENTRIES)
def entry(request: pytest.FixtureRequest) -> Entry:
    found = ENTRIES[request.param]
    if "shapes" in found.base and "packed" in request.node.callspec.params.values():
        pytest.skip("few shapes are padded")
    return found


def facts_of(step: Any) -> list[Any]:
    """All that a step is, but for its batch."""
    own = [] if step.idle else list(step.indices)
    return [*own, step.samples, step.weight, step.loss_scale, step.ends_update, step.idle]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_sample_once_in_equal_steps_that_add_up(entry: Entry, layout: str, ranks: int) -> None:
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
    assert [[facts_of(step) for step in steps] for steps in found] == [[facts_of(s) for s in steps] for steps in again]
    for step in itertools.chain.from_iterable(found):
        lengths = [LENGTHS[i] for i in step.indices]
        tokens = sum(lengths) if layout == "packed" else len(lengths) * max(lengths)
        assert tokens <= TOKENS or len(lengths) == 1
        edges = sum(graph_of(length)["edges"] for length in lengths)
        assert not isinstance(entry.base.get("lengths"), dict) or edges <= MOST_EDGES or len(lengths) == 1


@pytest.mark.parametrize(("ranks", "resumed"), [(1, 3), (3, 2)])
def test_a_model_meets_few_shapes(entry: Entry, ranks: int, resumed: int) -> None:
    """Law 11: over epochs, ranks and resumes, idle steps included."""
    if "shapes" not in entry.base:
        pytest.skip("batches have any shape")

    def run(world: Any, stop: int | None, states: Any) -> tuple[list[Any], Any]:
        loader = entry.make(world, **entry.base)
        if states is not None:
            loader.load_state_dict(states)
        steps = [*islice(loader, stop), *(loader if stop is None else ())]
        return [tuple(s.batch[name].shape) for s in steps for name in ("input_ids", "labels")], loader.state_dict()

    first = run_ranks(ranks, lambda world: run(world, 4, None))
    rest = run_ranks(resumed, lambda world: run(world, None, [state for _, state in first]))
    assert 1 < len({shape for shapes, _ in (*first, *rest) for shape in shapes}) <= entry.base["shapes"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_gradients_are_those_of_one_batch(entry: Entry, ranks: int) -> None:
    """Law 5, exactly: the loss of a batch is a mean over its units (label tokens, or samples), so what a sample adds to the
    averaged gradient is its units times the batch's loss scale, over the batch's units and the number of ranks."""
    by_samples = entry.make.__name__ == "sampler"
    units = {index: 1 if by_samples else length - 1 for index, length in enumerate(LENGTHS)}

    def run(world: Any) -> list[list[Any]]:
        return list(entry.make(world, **entry.base).updates())

    for parts in zip(*run_ranks(ranks, run), strict=True):
        steps = [step for part in parts for step in part if not step.idle]
        total = sum(units[index] for step in steps for index in step.indices)
        for step in steps:
            own = sum(units[index] for index in step.indices)
            assert step.loss_scale / ranks * total == pytest.approx(own, rel=1e-12)


@pytest.mark.parametrize(("ranks", "resumed", "layout", "epoch"), PLACES)
def test_a_run_goes_on_from_every_step(entry: Entry, ranks: int, resumed: int, layout: str, epoch: int) -> None:
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
def test_an_update_begun_on_other_ranks_is_finished_as_one(entry: Entry, ranks: int, resumed: int) -> None:
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
        rest = run_ranks(resumed, lambda world, s=[state for _, state in first]: some(world, None, s))
        before = list(zip(*(steps for steps, _ in first), strict=True))
        after = list(zip(*(steps for steps, _ in rest), strict=True))
        begun = stop - max((n for n, row in enumerate(before, start=1) if row[0].ends_update), default=0)
        left = next(n for n, row in enumerate(after, start=1) if row[0].ends_update)
        update = [step for row in before[len(before) - begun :] + after[:left] for step in row]
        weight = sum(step.weight.local for step in update)
        assert {step.samples.total for step in update} == {sum(step.samples.local for step in update)}
        assert {step.weight.total for step in update} == {weight}
        scales = [step.loss_scale * weight for row in after[:left] for step in row]
        assert scales == pytest.approx([step.weight.local * resumed for row in after[:left] for step in row])


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
        settings = {name: value} if name != "sampler" else {name: value, "shuffle": False}
        other = alone(entry, 1, **settings)
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(StateError):
            other.load_state_dict(state)
        assert other.state_dict() == before, f"a state of another {name} has changed the loader"
    alone(entry, 1).load_state_dict(state)


@pytest.mark.parametrize("broken", [None, 3, "state", [], {}, [None], [{}]], ids=str)
def test_what_is_no_state_is_refused(entry: Entry, broken: Any) -> None:
    with pytest.raises(StateError):
        alone(entry, 0).load_state_dict(broken)


def test_a_damaged_state_is_refused(entry: Entry) -> None:
    """Each of its fields changed, or gone."""
    loader = alone(entry, 3)
    state = json.loads(json.dumps(loader.state_dict()))
    before = copy.deepcopy(loader.state_dict())
    for key in state:
        for damaged in ({**state, key: "x"}, {name: value for name, value in state.items() if name != key}):
            with pytest.raises(StateError):
                loader.load_state_dict(damaged)
    assert loader.state_dict() == before
