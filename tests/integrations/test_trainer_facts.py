"""What the plain Trainer does to samples without a word, and ours does not. When an upstream half fails, upstream changed."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
from transformers import Trainer  # noqa: E402

from dynagroup.testing import assert_conserves  # noqa: E402
from tests.integrations import toys  # noqa: E402
from tests.integrations.jobs import arguments, trained_on, trainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


class Surplus:
    """A loader of batches of one sample whose number turns out to be another than its length."""

    def __init__(self, rows, expected):
        self.dataset, self.expected = rows, expected

    def __len__(self):
        return self.expected

    def __iter__(self):
        return (toys.collate([row]) for row in self.dataset)


def plain(folder, rows, expected, accumulation):
    args = arguments(folder, num_train_epochs=2, max_steps=-1, gradient_accumulation_steps=accumulation)
    run = Trainer(toys.causal_lm(), args, train_dataset=rows)
    run.get_train_dataloader = lambda: Surplus(rows, expected)
    seen = trained_on(run, rows)
    run.train()
    return [i for update in seen.values() for i in update], run


def test_fact_batches_beyond_the_expected_number_are_left_out(tmp_path):
    rows = toys.samples("causal", 14)
    seen, run = plain(tmp_path, rows, expected=10, accumulation=1)
    assert seen == [*range(10), *range(10)], "four samples of each epoch are never seen"
    assert run.state.global_step == 20


def test_fact_fewer_batches_than_expected_end_the_run_early(tmp_path):
    rows = toys.samples("causal", 6)
    _, run = plain(tmp_path / "1", rows, expected=10, accumulation=1)
    assert (run.state.global_step, run.state.max_steps) == (12, 20), "its schedule never comes to its end"
    rows = rows[:5]
    seen, run = plain(tmp_path / "2", rows, expected=6, accumulation=2)
    assert len(seen) == 10, "the fifth batch is run,"
    assert run.state.global_step == 4, "but no step follows it"


@pytest.mark.parametrize("hint", [1, 8], ids=["too short", "too long"])
def test_our_trainer_runs_every_sample_however_many_batches_that_takes(tmp_path, hint):
    """The lengths known beforehand are wrong by far, so there are more, or fewer, batches than could be expected."""
    rows = toys.samples("causal", 70)
    lengths = [max(1, n * hint // 4) for n in toys.lengths(rows)]
    config = {"mode": "online", "lengths": lengths}
    run = trainer("causal", tmp_path, fits=True, count=70, max_steps=-1, num_train_epochs=2, config=config)
    seen = trained_on(run, rows)
    run.train()
    assert run.state.global_step == run.state.max_steps == 10
    for epoch in (0, 1):
        assert_conserves((seen[update] for update in range(5 * epoch, 5 * epoch + 5)), range(70))
