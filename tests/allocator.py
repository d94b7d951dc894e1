"""A stand-in for a device's allocator: raises the real error when a batch's padded size exceeds a limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


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


@dataclass
class Allocator:
    """``claim(size)`` fails above ``limit``. Installed in a module, it claims the padded size of what passes through."""

    limit: float
    failures: list[int] = field(default_factory=list)
    claims: list[int] = field(default_factory=list)

    def claim(self, size: int) -> None:
        self.claims.append(size)
        if size > self.limit:
            self.failures.append(size)
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} tokens")

    def in_forward(self, module: torch.nn.Module) -> Callable[[], None]:
        """Fail before ``module`` runs, for a hidden state of (samples, tokens, features)."""

        def hook(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = next(a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor) and a.ndim >= 2)
            self.claim(hidden.shape[0] * hidden.shape[1])

        return module.register_forward_pre_hook(hook, with_kwargs=True).remove

    def in_backward(self, module: torch.nn.Module) -> Callable[[], None]:
        """Fail when the gradient of ``module``'s output arrives: later layers have theirs already."""

        def hook(_module: torch.nn.Module, _args: Any, output: Any) -> Any:
            if not torch.is_grad_enabled():
                return output
            hidden = output[0] if isinstance(output, tuple) else output
            marked = fails_in_backward(hidden, self, hidden.shape[0] * hidden.shape[1])
            return (marked, *output[1:]) if isinstance(output, tuple) else marked

        return module.register_forward_hook(hook).remove
