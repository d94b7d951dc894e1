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


@contextlib.contextmanager
def dynamic_batching(dynagroup: Budget | DynagroupConfig) -> Iterator[None]:
    """Context manager in which LLaMA-Factory's batches fit: ``with dynamic_batching(budget): run_exp(args)``.

    Args:
        dynagroup: a budget, or a :class:`DynagroupConfig`. In stages DPO and RM the budget counts both answers' tokens.
    """
    config = (
        dynagroup if isinstance(dynagroup, DynagroupConfig) else DynagroupConfig(budget=dynagroup)
    )
    pairs = replace(config, weigh="samples") if config.weigh == "auto" else config
    with contextlib.ExitStack() as stack:
        for stage, name in STAGES.items():
            original = getattr(import_module(f"llamafactory.train.{stage}.trainer"), name)
            ours = partial(
                dynagroup_trainer(original), dynagroup=pairs if stage in ("dpo", "rm") else config
            )
            for part in (
                "trainer",
                "workflow",
            ):  # some workflows import their Trainer early, others when they run
                module = import_module(f"llamafactory.train.{stage}.{part}")
                if hasattr(module, name):
                    stack.callback(setattr, module, name, getattr(module, name))
                    setattr(module, name, ours)
        yield
