"""Every state that a loader gives is taken back, on any number of ranks, and each sample of the epoch comes once."""

import json
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dynagroup import LearningBudget, TokenBudget
from dynagroup.testing import run_ranks
from tests.laws.loaders import ENTRIES, graphs_of, kinds_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:too few samples for an equal number"),
    pytest.mark.filterwarnings("ignore:.*do not fit the budget even alone"),
]
LENGTHS = np.random.default_rng(24).integers(1, 60, 23).tolist()


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=8, max_size=40),
    most=st.integers(1, 150),
    kind=st.sampled_from([name for name, entry in ENTRIES.items() if entry.moves]),
    layout=st.sampled_from(["padded", "packed"]),
    seed=st.integers(0, 9),
    chain=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.booleans()), min_size=3, max_size=3),
)
@example(lengths=LENGTHS, most=1, kind="planned-free", layout="padded", seed=1, chain=[(2, 1, 0), (5, 3, 0), (1, 1, 0)])
@example(
    lengths=LENGTHS, most=150, kind="planned-free", layout="padded", seed=1, chain=[(2, 1, 0), (2, 3, 1), (1, 1, 1)]
)
def test_a_state_is_taken_back_after_three_changes_of_ranks_and_of_what_was_learned(
    lengths, most, kind, layout, seed, chain
):
    """Rows are filled by repeats where a batch holds one sample: those come beyond the epoch's samples, never instead of them.

    What is learned is applied when a state was loaded, and again while the epoch is under way."""
    emitted: Counter[int] = Counter()
    states: Any = None
    layout = "padded" if "shapes" in ENTRIES[kind].base else layout
    how = {"lengths": lengths, "max_tokens": most, **ENTRIES[kind].base, "seed": seed}
    how |= {"lengths": graphs_of(lengths)} if kind.endswith("graphs") else {}
    how |= {"length_hint": lengths} if "length_hint" in how else {}
    how |= {"kinds": kinds_of(len(lengths))} if "kinds" in how else {}
    for ranks, steps, learns in [*chain, (2, None, True)]:

        def run(world: Any, states: Any = states, steps: int | None = steps, learns: Any = learns) -> tuple[Any, ...]:
            budget = LearningBudget(TokenBudget(most, layout=layout))

            def learn() -> None:
                if learns:
                    budget.record_failed_cost(min(budget.limits[0], most) * 0.8)
                    budget.apply()

            loader = ENTRIES[kind].make(world, layout, **{**how, "max_tokens": lambda _layout: budget})
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
        found = run_ranks(min(ranks, how.get("samples_per_update", 5)) if kind.startswith("sampler") else ranks, run)
        emitted.update(index for used, _, _ in found for index in used)
        states = [state for _, state, _ in found]
        assert how.get("one_kind") == "batch" or len({tuple(kinds) for _, _, kinds in found}) == 1, "law 10"
    assert set(emitted) == set(range(len(lengths)))
    assert kind.startswith("sampler") or emitted.total() == len(lengths)
