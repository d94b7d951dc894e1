"""A loader can be pickled and copied: fresh, within an epoch, and between two."""

from __future__ import annotations

import copy
import pickle
from itertools import islice

import pytest

from tests.online.helpers import lengths_of, make_loader, used

LENGTHS = lengths_of(60, seed=2)


MAKE = {
    "free": lambda: make_loader(None, LENGTHS, shuffle=True),
    "updates": lambda: make_loader(None, LENGTHS, samples_per_update=16, num_workers=1, persistent_workers=True),
}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))], ids=["copy", "pickle"]
)
def test_a_copy_goes_on_as_the_loader_does(make, copied):
    loader = make()
    fresh = copied(loader)
    first = [used(step) for step in loader]
    assert [used(step) for step in fresh] == first
    between = copied(loader)
    assert between.epoch == loader.epoch == 1
    second = [used(step) for step in loader]
    assert [used(step) for step in between] == second
    assert between.cursor == loader.cursor


@pytest.mark.parametrize("make", [MAKE["free"], MAKE["updates"]], ids=["free", "updates"])
def test_a_copy_within_an_epoch_goes_on_there(make):
    loader, came = make(), []
    for step in loader:
        came.append(used(step))
        if len(came) == 3:
            rest = [used(step) for step in copy.deepcopy(loader)]
    assert came[3:] == rest


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_loaded_loader_can_be_copied_before_it_goes_on(make, steps):
    """Within an update too: the copy took the update that was under way for done."""
    loader = make()
    came = [used(step) for step in islice(loader, steps)]
    state, loaded = loader.state_dict(), make()
    loaded.load_state_dict(state)
    twin = copy.deepcopy(loaded)
    rest = [used(step) for step in loaded]
    assert [used(step) for step in twin] == rest
    assert sorted(i for step in (*came, *rest) for i in step) == list(range(60))
