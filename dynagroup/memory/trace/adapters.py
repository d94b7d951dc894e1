"""Adapters of peft on models that have shapes but no data."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch.nn.utils import parametrize

from dynagroup.errors import ConfigError

__all__ = ["fold_on_meta", "with_adapters"]


def with_adapters(model: Any, lora: Any) -> Any:
    """The model with adapters in it, kept in float32: of every linear layer, unless ``lora`` (True, a rank, or a config of peft)
    says otherwise.

    Raises:
        ConfigError: ``lora`` is something else, or peft is missing.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError("`lora` needs peft: pip install peft") from error
    if not isinstance(lora, (int, peft.LoraConfig)):
        raise ConfigError(f"`lora` must be True, a rank or a LoraConfig of peft, but is {lora!r}")
    own = isinstance(lora, int)
    config: Any = peft.LoraConfig(r=16 if lora is True else lora) if own else lora
    if config.target_modules is None:
        config.target_modules = "all-linear"
    with warnings.catch_warnings():
        if own:  # peft adds patterns for stacks of experts by itself, and warns where they match nothing
            warnings.filterwarnings(
                "ignore", message="The following (rank|alpha)_pattern keys", category=RuntimeWarning
            )
        adapted: Any = peft.inject_adapter_in_model(config, model)
    for p in adapted.parameters():
        if p.requires_grad and p.dtype in (torch.float16, torch.bfloat16):
            p.data = p.data.float()
    return adapted.to("meta")


def fold_on_meta(model: torch.nn.Module) -> None:
    """Let a copy without data run adapters of expert stacks, which are folded into the stack before each use.

    peft folds under ``torch.autocast(device_type=...)``, which PyTorch refuses for "meta"; here it is done without.
    """
    for module in model.modules():
        if hasattr(module, "get_delta_factors") and hasattr(module, "_activate_lora"):
            module._activate_lora = MethodType(_folded, module)  # type: ignore[assignment]


@contextmanager
def _folded(wrapper: Any, active: list[str]) -> Iterator[None]:
    named = [name for name in active if name in wrapper.lora_A]
    if len(named) != 1 or wrapper.num_experts < 2:  # peft then adds the adapters' product, and needs no autocast
        with type(wrapper)._activate_lora(wrapper, active):
            yield
        return
    layer, name, trained = wrapper.get_base_layer(), wrapper.parameter_name, wrapper.get_param().requires_grad
    parametrize.register_parametrization(layer, name, _Fold(*wrapper.get_delta_factors(named[0])))
    layer.parametrizations[name].original.requires_grad_(trained)
    try:
        with parametrize.cached():
            yield
    finally:
        wrapper._remove_parametrizations()


class _Fold(torch.nn.Module):
    def __init__(self, left: torch.Tensor, right: torch.Tensor, scaling: float) -> None:
        super().__init__()
        self._factors = (left, right, scaling)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        left, right, scaling = self._factors
        return torch.baddbmm(weight, left, right, alpha=scaling)
