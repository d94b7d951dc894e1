"""A Mixture in the Trainer: fixed shares in every update and in the log, changed by a callback, and resumed."""

from typing import Any

import pytest
from transformers import TrainerCallback

from dynagroup import ConfigError, Mixture, TokenBudget
from dynagroup.integrations.config import DynagroupConfig
from tests.integrations.toys import trainer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
SHARES = {"first": 3, "second": 1}
CHANGED = {"first": 1, "second": 3}


def mixture() -> Mixture:
    sources = {"first": range(32), "second": range(32, 96)}
    return Mixture(sources, SHARES, num_samples=64, samples_per_update=8)


class SetsShares(TrainerCallback):
    """Changes the shares after the third update, as a callback would by a metric."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            self.mixture.set_shares(CHANGED)


def shares_of_a_run(tmp_path: Any, resume: str | None = None) -> list[tuple[float, float]]:
    mixed = mixture()
    run = trainer(
        "causal",
        tmp_path,
        fits=True,
        count=96,
        callbacks=[SetsShares(mixed)],
        config={"mixture": mixed, "samples_per_update": 8},
        max_steps=6,
        logging_steps=1,
        save_strategy="steps",
        save_steps=5,
    )
    run.train(resume_from_checkpoint=resume)
    logs = [entry for entry in run.state.log_history if "share_first" in entry]
    return [(entry["share_first"], entry["share_second"]) for entry in logs]


def test_shares_are_in_the_log_and_a_resumed_run_keeps_those_that_were_set(tmp_path):
    expected = [(0.75, 0.25)] * 3 + [(0.25, 0.75)] * 3
    assert shares_of_a_run(tmp_path) == expected
    assert shares_of_a_run(tmp_path, resume=str(tmp_path / "checkpoint-5")) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"plan": {"sampler": mixture()}}, r"DynagroupConfig\(mixture="),
        ({"mixture": [0, 1]}, "`mixture` must be a dynagroup.Mixture"),
        ({"mixture": mixture(), "updates": "free"}, "`mixture` needs updates='preserved'"),
    ],
)
def test_settings_of_a_mixture_that_would_be_lost_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        DynagroupConfig(budget=TokenBudget(100), **settings)
