"""A plugin that gives Axolotl's Trainer batches that fit.

In Axolotl's YAML::

    plugins:
      - dynagroup.integrations.axolotl.DynagroupPlugin
    dynagroup_max_tokens: 16384
    sample_packing: false
"""

from functools import partialmethod
from typing import Any

from axolotl.core.trainers import AxolotlTrainer  # pyright: ignore[reportMissingImports]
from axolotl.integrations.base import BasePlugin  # pyright: ignore[reportMissingImports]
from pydantic import BaseModel

from dynagroup.budget.tokens import TokenBudget
from dynagroup.errors import ConfigError
from dynagroup.integrations.hf import DynagroupTrainerMixin

EXCLUDED = ("sample_packing", "rl", "reward_model", "pretraining_dataset", "pad_to_sequence_len")
"""Options of Axolotl that form batches themselves, or use other trainers or samples."""


class DynagroupArgs(BaseModel):
    """The keys that the plugin adds to Axolotl's configuration."""

    dynagroup_max_tokens: int | None = None
    """Most tokens of a batch, padding included; None: the plugin does nothing."""


class DynagroupPlugin(BasePlugin):  # type: ignore[misc]
    """Makes AxolotlTrainer form batches of at most ``dynagroup_max_tokens`` tokens."""

    def get_input_args(self) -> str:
        return "dynagroup.integrations.axolotl.DynagroupArgs"

    def get_trainer_cls(self, cfg: Any) -> type | None:
        """Returns the Trainer class; None: no ``dynagroup_max_tokens``. ConfigError: another option forms batches."""
        if not cfg.dynagroup_max_tokens:
            return None
        for name in EXCLUDED:
            if getattr(cfg, name, None):
                raise ConfigError(
                    f"`{name}` must be unset or false, because `dynagroup_max_tokens` forms batches"
                )
        # Axolotl pads to a multiple of 64 unless `pad_to_sequence_len` is set.
        multiple = 64 if getattr(cfg, "pad_to_sequence_len", None) is None else 1
        budget = TokenBudget(cfg.dynagroup_max_tokens, pad_to_multiple_of=multiple)
        init = partialmethod(DynagroupTrainerMixin.__init__, dynagroup=budget)
        bases = (DynagroupTrainerMixin, AxolotlTrainer)
        return type("DynagroupAxolotlTrainer", bases, {"__init__": init})
