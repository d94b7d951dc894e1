"""An experiment: gradient checkpointing for the steps that need it, and for no others."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.recompute import RecomputeBudget
from dynagroup.distributed import World, current_world
from dynagroup.errors import ConfigError
from dynagroup.memory.trace.model import checkpoint_layers
from dynagroup.oom.fields import shape_of
from dynagroup.oom.split import BatchSplitter
from dynagroup.plan.plan import BatchPlan
from dynagroup.shapes import BatchShape

__all__ = ["RecomputeWhereNeeded", "recomputed_steps"]


class RecomputeWhereNeeded:
    """Experimental. Switches a model's gradient checkpointing on before a step that needs it, and off before others.

    All ranks of a step decide alike: on where any rank's batch needs it, because ranks that share parameters gather them once
    more for a recomputed layer. That is one all-reduce of one number a step. Gradients are the same either way.

    Args:
        model: a ``transformers`` model, also inside DDP, FSDP or peft: any whose modules have a ``gradient_checkpointing``
            flag. It is left switched off.
        budget: what the loader's batches fit: says which batches need it.
        world: ranks that train together; default: those of ``torch.distributed``.

    Raises:
        ConfigError: the model has no such modules.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50))
    >>> from dynagroup.budget.tokens import TokenBudget
    >>> recompute = RecomputeWhereNeeded(model, RecomputeBudget(TokenBudget(64), TokenBudget(256)))
    >>> import torch
    >>> [recompute({"input_ids": torch.ones(n, length)}) for n, length in ((4, 16), (1, 200), (1, 60))]
    [False, True, False]
    """

    def __init__(self, model: Any, budget: RecomputeBudget, *, world: World | None = None) -> None:
        own = getattr(model, "module", model)
        if hasattr(own, "gradient_checkpointing_enable"):
            checkpoint_layers(own)  # gives every layer what it calls when it is switched on
        self._switches = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) is True]
        if not self._switches:
            raise ConfigError(
                f"{type(own).__name__} has no layers that can be switched: none has a `gradient_checkpointing` flag; "
                "models of transformers do, where they support it"
            )
        self._budget, self._world = budget, current_world() if world is None else world
        self.num_steps = self.num_recomputed = 0
        """Steps decided so far, and those of them that were recomputed."""
        self._switch(False)

    def __call__(self, batch: Any, shape: BatchShape | None = None) -> bool:
        """Decide for the next forward and backward pass; collective.

        Args:
            batch: what the model is about to be given. shape: of it (K = 1), where its tokens are not in ``input_ids``.

        Returns:
            Whether this step is recomputed.
        """
        known = shape_of(batch, BatchSplitter().num_samples(batch)) if shape is None else shape
        needed = bool(self._world.all_max([int(self._budget.needs(known).any())])[0])
        self._switch(needed)
        self.num_steps += 1
        self.num_recomputed += needed
        return needed

    def _switch(self, on: bool) -> None:
        for module in self._switches:
            module.gradient_checkpointing = on


def recomputed_steps(plan: BatchPlan, budget: RecomputeBudget) -> NDArray[np.bool_]:
    """Which steps of a plan are recomputed, on every rank: bool (num_steps,). What :class:`RecomputeWhereNeeded` will decide.

    >>> from dynagroup.budget.tokens import TokenBudget
    >>> from dynagroup.plan.sampler import LengthAwareBatchSampler
    >>> budget = RecomputeBudget(TokenBudget(64), TokenBudget(256))
    >>> plan = LengthAwareBatchSampler(np.array([200, 32, 32, 30, 30]), budget).plan
    >>> [len(row[0]) for row in plan.rows], recomputed_steps(plan, budget).tolist()
    ([1, 2, 2], [True, False, False])
    """
    return np.asarray(budget.needs(plan.shapes)[plan.table].any(axis=1))
