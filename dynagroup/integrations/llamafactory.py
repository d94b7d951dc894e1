"""Batches that fit in LLaMA-Factory's SFT, PT, DPO and RM stages.

A LLaMA-Factory workflow builds its own Trainer. Inside :func:`dynamic_batching` the workflows build ours instead;
nothing else changes, and on exit everything is as before.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module

from dynagroup.budget.base import Budget
from dynagroup.integrations.config import DynagroupConfig
from dynagroup.integrations.hf import dynagroup_trainer

STAGES = {"sft": "CustomSeq2SeqTrainer", "pt": "CustomTrainer", "dpo": "CustomDPOTrainer", "rm": "PairwiseTrainer"}
"""KTO compares the samples of a batch with each other, and PPO makes its own batches."""


@contextlib.contextmanager
def dynamic_batching(dynagroup: Budget | DynagroupConfig) -> Iterator[None]:
    """Context: LLaMA-Factory's workflows train with batches that fit: ``with dynamic_batching(budget): run_exp(args)``.

    Args:
        dynagroup: a budget, or a whole configuration. In the DPO and RM stages the budget counts the tokens of both answers.
    """
    config = dynagroup if isinstance(dynagroup, DynagroupConfig) else DynagroupConfig(budget=dynagroup)
    pairs = replace(config, weigh="samples") if config.weigh == "auto" else config
    with contextlib.ExitStack() as stack:
        for stage, name in STAGES.items():
            original = getattr(import_module(f"llamafactory.train.{stage}.trainer"), name)
            ours = partial(dynagroup_trainer(original), dynagroup=pairs if stage in ("dpo", "rm") else config)
            for part in ("trainer", "workflow"):  # some workflows import their Trainer when they run, others before
                module = import_module(f"llamafactory.train.{stage}.{part}")
                if hasattr(module, name):
                    stack.callback(setattr, module, name, getattr(module, name))
                    setattr(module, name, ours)
        yield
