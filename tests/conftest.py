"""What stands when a file of tests begins (thousands of modules of the frameworks) is kept out of garbage collection: a Trainer
collects at the start of every training, and would spend more time on that than on a small model."""

import gc

import pytest
from torch.utils.data import _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter


@pytest.fixture(autouse=True, scope="module")
def imported_modules_are_no_garbage():
    gc.collect()
    gc.freeze()


@pytest.fixture
def dead_workers_are_seen_soon(monkeypatch):
    """torch looks every five seconds whether its workers live; a test of a dead one need not wait for it. Loaders that
    lost a worker end inside the test, too."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    yield
    gc.collect()
