"""Which of torch's attention kernels run batches of varying shape.

On H100, H200 and B200 recent versions of torch prefer cuDNN's kernel, which builds a plan for every new shape of a
batch. ``docs/benchmarks.md`` has the measured time of a plan, about half a second."""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch.nn.attention import sdpa_kernel

from dynagroup.errors import ConfigError

if TYPE_CHECKING:
    from torch.nn.attention import SDPBackend

AttentionBackends: TypeAlias = "Literal['auto'] | Sequence[SDPBackend] | None"


def check_attention_backends(backends: AttentionBackends) -> AttentionBackends:
    """Returns the argument. Raises ConfigError if it is no valid ``attention_backends``."""
    if backends is None or backends == "auto":
        return backends
    kinds = torch.nn.attention.SDPBackend
    is_list = isinstance(backends, (list, tuple)) and len(backends) > 0
    if not is_list or not all(isinstance(backend, kinds) for backend in backends):
        raise ConfigError(
            '`attention_backends` must be "auto", None (torch chooses), or a list of '
            f"torch.nn.attention.SDPBackend, but is {backends!r}"
        )
    return backends


class _WithoutCudnn:
    """Context manager in which cuDNN's kernel is off. The switch is of the whole process, and threads may be in several steps
    at once: so the first one turns it off, and the last one back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._was_enabled = True

    def __enter__(self) -> None:
        with self._lock:
            if self._num_inside == 0:
                flags = torch.backends.cuda
                self._was_enabled = flags.cudnn_sdp_enabled()
                has_another = (
                    flags.flash_sdp_enabled()
                    or flags.mem_efficient_sdp_enabled()
                    or flags.math_sdp_enabled()
                )
                flags.enable_cudnn_sdp(self._was_enabled and not has_another)
            self._num_inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0:
                torch.backends.cuda.enable_cudnn_sdp(self._was_enabled)


_without_cudnn = _WithoutCudnn()


def attention_kernels(backends: AttentionBackends, *, varies: bool) -> AbstractContextManager[Any]:
    """Returns a context for a step: which kernels ``scaled_dot_product_attention`` may use. Entering it takes a microsecond.

    The switches are those of the whole process. Steps in several threads may overlap with "auto", but not with lists.

    Args:
        backends: "auto": all but cuDNN's while shapes vary. None: torch chooses. A list of
            ``torch.nn.attention.SDPBackend``: only these.
        varies: whether batches have many shapes.

    >>> with attention_kernels("auto", varies=True):
    ...     torch.backends.cuda.cudnn_sdp_enabled()
    False
    """
    if backends == "auto":
        return _without_cudnn if varies else nullcontext()
    if backends is None:
        return nullcontext()
    return sdpa_kernel(list(backends))
