"""What stands when a file of tests begins (thousands of modules of the frameworks) is kept out of garbage collection: a Trainer
collects at the start of every training, and would spend more time on that than on a small model."""

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def imported_modules_are_no_garbage():
    gc.collect()
    gc.freeze()
