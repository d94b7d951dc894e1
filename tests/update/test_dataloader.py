"""Arguments that go on to torch's DataLoader are refused before a worker starts, by every loader alike."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dynagroup import ConfigError, OnlineDataLoader, PlannedDataLoader, TokenBudget, text_dataloader

DATA = [{"input_ids": [1] * 3}] * 20
TOKENIZER = SimpleNamespace(pad_token_id=0)
LOADERS = {
    "online": lambda **kwargs: OnlineDataLoader(DATA, TokenBudget(60), collate_fn=list, weigh="samples", **kwargs),
    "planned": lambda **kwargs: PlannedDataLoader(
        DATA, [3] * 20, TokenBudget(60), collate_fn=list, weigh="samples", **kwargs
    ),
    "text": lambda **kwargs: text_dataloader(["a b c"] * 20, TOKENIZER, TokenBudget(60), lengths=[3] * 20, **kwargs),
}


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize(
    "wrong",
    [
        {"num_workers": -1},
        {"num_workers": 1.5},
        {"num_workers": True},
        {"num_workers": 1, "prefetch_factor": 0},
        {"prefetch_factor": 2},
        {"num_workers": 1, "timeout": -1},
        {"num_workers": 1, "timeout": "soon"},
        {"persistent_workers": True},
        {"persistent_workers": "yes", "num_workers": 1},
        {"pin_memory": "yes"},
        {"in_order": 3},
        {"worker_init_fn": 3},
        {"generator": 3},
        {"num_workers": 1, "multiprocessing_context": "thread"},
        {"num_worker": 1},
    ],
    ids=str,
)
def test_wrong_arguments_of_the_inner_loader_are_refused_at_once(loader, wrong):
    with pytest.raises(ConfigError, match=f"`?{next(iter(wrong))}|{list(wrong)[-1]}"):
        loader(**wrong)


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
def test_right_ones_are_not(loader):
    loader(num_workers=0, prefetch_factor=None, timeout=0, pin_memory=False, worker_init_fn=None)
    loader(num_workers=2, prefetch_factor=3, timeout=1.5, persistent_workers=True, multiprocessing_context="spawn")
