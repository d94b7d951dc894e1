"""A worker that dies is told as such, wherever it was when it died."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from dynagroup.update.loader import answers_of


def dies_with(error):
    yield 1
    raise error


@pytest.mark.parametrize("error", [EOFError(), ConnectionResetError(104, "Connection reset by peer")])
def test_a_worker_that_dies_handing_over_is_told(error):
    answers = answers_of(dies_with(error))
    assert next(answers) == 1
    with pytest.raises(RuntimeError, match="worker died while it handed over a batch"):
        next(answers)


def test_the_users_own_end_of_file_stays_what_it_is():
    said = "Caught EOFError in DataLoader worker process 0.\nEOFError: broken shard 7"
    with pytest.raises(EOFError, match="broken shard 7"):
        list(answers_of(dies_with(EOFError(said))))


def test_without_workers_nobody_died():
    def broken(self, index):
        raise ConnectionResetError(104, "Connection reset by peer")

    class Broken:
        __getitem__ = broken

        def __len__(self):
            return 2

    with pytest.raises(ConnectionResetError):
        list(answers_of(DataLoader(Broken())))
