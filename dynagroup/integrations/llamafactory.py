"""Gives LLaMA-Factory batches that fit, in its stages SFT, PT, DPO and RM. Workflows make Trainers of their own; inside
:func:`dynamic_batching` they make dynagroup's. On exit, all is restored."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module

from dynagroup.budget.base import Budget
from dynagroup.integrations.config import DynagroupConfig
from dynagroup.integrations.hf import dynagroup_trainer

STAGES = {
    "sft": "CustomSeq2SeqTrainer",
    "pt": "CustomTrainer",
    "dpo": "CustomDPOTrainer",
    "rm": "PairwiseTrainer",
}
"""Trainer class of each stage. KTO is left out (it compares samples of a batch), and PPO (it makes its own batches)."""
PAIRS = ("dpo", "rm")  # stages whose samples are pairs of answers


@contextlib.contextmanager
def dynamic_batching(dynagroup: Budget | DynagroupConfig) -> Iterator[None]:
    """Context manager in which LLaMA-Factory's batches fit: ``with dynamic_batching(budget): run_exp(args)``.

    Args:
        dynagroup: a budget, or a :class:`DynagroupConfig`. In stages DPO and RM the budget counts both answers' tokens.
    """
    config = dynagroup
    if not isinstance(config, DynagroupConfig):
        config = DynagroupConfig(budget=config)
    with contextlib.ExitStack() as stack:
        for stage, name in STAGES.items():
            original = vars(import_module(f"llamafactory.train.{stage}.trainer"))[name]
            of_stage = config
            if stage in PAIRS and config.weigh == "auto":
                of_stage = replace(config, weigh="samples")
            ours = partial(dynagroup_trainer(original), dynagroup=of_stage)
            # some workflows import their Trainer early, others when they run
            for part in ("trainer", "workflow"):
                module = import_module(f"llamafactory.train.{stage}.{part}")
                if name in vars(module):
                    stack.callback(setattr, module, name, vars(module)[name])
                    setattr(module, name, ours)
        yield
