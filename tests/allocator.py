"""Running out of memory in a backward pass, which a test alone asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dynagroup import testing


class _FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, allocator: Allocator, size: int) -> torch.Tensor:
        ctx.allocator, ctx.size = allocator, size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.allocator.claim(ctx.size)
        return gradients[0], None, None


def fails_in_backward(x: torch.Tensor, allocator: Allocator, size: int) -> torch.Tensor:
    """``x``; its backward pass claims ``size``."""
    return _FailInBackward.apply(x, allocator, size)  # type: ignore[return-value]


class Allocator(testing.Allocator):
    def in_backward(self, module: torch.nn.Module) -> Callable[[], None]:
        """Fail when the gradient of ``module``'s output arrives: later layers have theirs already."""

        def hook(_module: torch.nn.Module, _args: Any, output: Any) -> Any:
            if not torch.is_grad_enabled():
                return output
            hidden = output[0] if isinstance(output, tuple) else output
            marked = fails_in_backward(hidden, self, hidden.shape[0] * hidden.shape[1])
            return (marked, *output[1:]) if isinstance(output, tuple) else marked

        return module.register_forward_hook(hook).remove
