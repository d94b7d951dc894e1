"""Runs operators as a CUDA device would, on tensors without data, and counts the bytes that are alive. Without it
PyTorch would choose the CPU's kernels, which store attention scores and make extra copies in softmax."""

import math
import weakref
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

# documented for extension authors; no public alias yet
from torch.utils._python_dispatch import TorchDispatchMode

from dynagroup.memory.phases import MASK_ALIGNMENT

_aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
# Largest head size of the flash kernel (aten/native/transformers/cuda/sdp_utils.cpp).
FLASH_HEAD_SIZE = 256

# Operators that torch.autocast runs in the lower precision (LOWER) or in float32 (HIGHER) on CUDA (autocast_mode.h).
LOWER = {
    F.linear,
    F.conv1d,
    F.conv2d,
    F.conv3d,
    torch.matmul,
    torch.bmm,
    torch.mm,
    torch.addmm,
    torch.baddbmm,
    torch.einsum,
    torch.Tensor.baddbmm,
    torch.Tensor.addmm,
    torch.Tensor.addbmm,
    torch.Tensor.matmul,
    torch.Tensor.bmm,
    torch.Tensor.mm,
    torch.Tensor.__matmul__,
    torch.conv1d,
    torch.conv2d,
    torch.addbmm,
    F.scaled_dot_product_attention,
}
HIGHER = {
    F.softmax,
    F.log_softmax,
    F.layer_norm,
    F.group_norm,
    F.cross_entropy,
    F.nll_loss,
    torch.softmax,
    torch.log_softmax,
    torch.layer_norm,
    torch.pow,
    torch.rsqrt,
    torch.exp,
    torch.log,
    torch.sum,
    torch.cumsum,
    torch.norm,
    torch.prod,
    torch.Tensor.pow,
    torch.Tensor.rsqrt,
    torch.Tensor.exp,
    torch.Tensor.log,
    torch.Tensor.sum,
    torch.Tensor.softmax,
    torch.Tensor.__pow__,
}
# Functions whose kernel reads float16 and writes float32 (aten/native/SoftMax.cpp).
SOFTMAX = {
    F.softmax: _aten._softmax,
    torch.softmax: _aten._softmax,
    torch.Tensor.softmax: _aten._softmax,
    F.log_softmax: _aten._log_softmax,
}
GROUPED_MM = getattr(torch, "_grouped_mm", None)  # since torch 2.7


class CudaKernels(TorchFunctionMode):
    """Runs attention, dropout and softmax with CUDA's kernels; ``autocast``: dtype of ``torch.autocast`` or None.
    Tensors have no values, so checks get fixed answers: a mask has padding if ``padded``, and nothing is infinite."""

    def __init__(self, autocast: torch.dtype | None = None, padded: bool = True) -> None:
        super().__init__()
        self.padded = padded
        self.autocast = autocast
        self._cast_weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.autocast is not None and (func in LOWER or func in HIGHER):
            cast = self._lower if func in LOWER else _higher
            args = tuple(map(cast, args))
            kwargs = {name: cast(value) for name, value in kwargs.items()}
        if args and isinstance(args[0], torch.Tensor):
            result = self._replaced(func, args, kwargs)
            if result is not None:
                return result
        return KERNELS.get(func, func)(*args, **kwargs)

    def _replaced(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Returns the result of a function that would run otherwise on CUDA, or needs values; None: no such function."""
        values = args[0]
        if func in SOFTMAX and values.dtype == torch.float16:
            if kwargs.get("dtype") == torch.float32:  # read without a copy, as only float16 is
                dim = kwargs["dim"] if "dim" in kwargs else args[1]
                return SOFTMAX[func](values, dim, True)
        if func == GROUPED_MM and values.dtype != torch.bfloat16:
            return (
                values @ args[1][0]
            )  # CUDA also multiplies other dtypes; the same bytes are alive
        if not values.is_meta:
            return None
        if func in (torch.masked_select, torch.Tensor.masked_select):
            return values.flatten().clone()  # all of them, as nothing is known of the mask
        return None if len(args) > 1 or kwargs else self._answer(func, values)

    def _answer(self, func: object, values: torch.Tensor) -> torch.Tensor | bool | None:
        """Returns the answer of a function that reads the values of one tensor; None: no such function."""
        if func is torch.Tensor.__bool__:
            return not self.padded
        if func in (torch.any, torch.Tensor.any):
            return torch.tensor(False, device="cpu")
        # Models compare the largest label with the size of the vocabulary.
        if func is torch.Tensor.max and not values.is_floating_point():
            return torch.zeros((), dtype=values.dtype, device="cpu")
        return None

    def end_forward(self) -> None:
        """Ends the autocast region: drops the weights that autocast has cast and cached."""
        self.autocast = None
        self._cast_weights.clear()

    def _lower(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
            return type(value)(map(self._lower, value))
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(self.autocast)
        # Autocast casts a weight once a forward pass, and again for a first gradient. The pair keeps the weight and its id alive.
        _, cast = self._cast_weights.get(id(value), (value, None))
        if cast is None or (torch.is_grad_enabled() and not cast.requires_grad):
            cast = value.to(self.autocast)
            self._cast_weights[id(value)] = (value, cast)
        return cast


def _higher(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALF else value


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Runs ``scaled_dot_product_attention`` as CUDA would: flash, else memory-efficient, else with all scores stored."""
    repeats = query.shape[-3] // key.shape[-3]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
            attn_mask.logical_not(), float("-inf")
        )
    head_size = query.shape[-1]
    is_half = query.dtype in HALF
    has_one_size = head_size == value.shape[-1]
    is_flash = is_half and attn_mask is None and has_one_size and head_size <= FLASH_HEAD_SIZE
    alignment = 8 if is_half else 4
    is_odd = head_size % alignment > 0 or value.shape[-1] % alignment > 0
    # sdp_utils.cpp: minimum_gemm_alignment, num_heads_dense (Falcon), last_dim_stride_equals_1_dense (T5's biases)
    if (
        (is_odd and not is_flash)
        or (repeats > 1 and not enable_gqa)
        or (attn_mask is not None and attn_mask.stride(-1) != 1)
    ):
        return _stored(query, key, value, attn_mask, dropout_p, scale)
    if is_flash:
        return _aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    # The memory-efficient kernel needs as many key heads as query heads.
    key = _repeated(key, repeats)
    value = _repeated(value, repeats)
    if attn_mask is not None:
        attn_mask = _bias(attn_mask, query, key)
    save = torch.is_grad_enabled() and query.requires_grad
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, save, dropout_p, is_causal, scale=scale
    )[0]


def _repeated(heads: torch.Tensor, repeats: int) -> torch.Tensor:
    return heads.repeat_interleave(repeats, -3) if repeats > 1 else heads


def _stored(
    query: Any, key: Any, value: Any, mask: Any, dropout_p: float, scale: float | None
) -> torch.Tensor:
    """Stores all scores, in float32 (aten/native/transformers/attention.cpp, _scaled_dot_product_attention_math)."""
    dtype = query.dtype
    repeats = query.shape[-3] // key.shape[-3]
    root = math.sqrt(query.shape[-1] ** -0.5 if scale is None else scale)
    query = _higher(query * root)
    key = _repeated(_higher(key), repeats)
    value = _repeated(_higher(value), repeats)
    scores = query @ (key.transpose(-2, -1) * root)
    if mask is not None:
        scores.add_(mask)
    return (dropout(_aten._safe_softmax(scores, -1), dropout_p) @ value).to(dtype)


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Returns a mask as the additive bias of the memory-efficient kernel; every call makes a copy, as on CUDA."""
    width = mask.shape[-1]
    if padding := -width % MASK_ALIGNMENT:
        mask = F.pad(mask, (0, padding))[..., :width]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if not training or p == 0:
        return input
    return _aten.native_dropout(input, p, True)[0]  # its mask: a byte per element


class _Ctc(torch.autograd.Function):
    """What the CTC kernel keeps: the log probability of each prefix of the labels at each position, and in the backward
    pass as much for the suffixes (aten/native/cuda/LossCTC.cu)."""

    @staticmethod
    def forward(ctx: Any, log_probs: torch.Tensor, num_states: int) -> torch.Tensor:
        num_positions, num_samples, _ = log_probs.shape
        prefixes = log_probs.new_empty(num_samples, num_positions, num_states)
        ctx.save_for_backward(log_probs, prefixes)
        return log_probs.new_empty(num_samples)

    @staticmethod
    def backward(ctx: Any, *_: object) -> tuple[torch.Tensor, None]:
        log_probs, prefixes = ctx.saved_tensors
        suffixes = torch.empty_like(prefixes)
        gradient = torch.empty_like(log_probs)
        del suffixes
        return gradient, None


def ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, *_: object, **__: object
) -> torch.Tensor:
    """Runs CTC as CUDA would, for labels that are as many for each sample."""
    num_labels = targets.numel() // log_probs.shape[1]
    return _Ctc.apply(log_probs, 2 * num_labels + 1).sum()


# Functions that run as they would on CUDA.
KERNELS = {F.scaled_dot_product_attention: attention, F.dropout: dropout, F.ctc_loss: ctc_loss}

BLOCK = 512  # the caching allocator rounds up to multiples of this (c10/cuda/CUDACachingAllocator.h, kMinBlockSize)


def rounded_up(num_bytes: int) -> int:
    """Returns the bytes of an allocation."""
    return -(-num_bytes // BLOCK) * BLOCK


def _beside_attention(_: object, query: torch.Tensor, *others: object) -> int:
    """The kernels sum the query's gradient in float32, and store one float32 per row (``dq_accum``, ``softmax_d`` in
    FlashAttention 2; ``delta`` and ``workspace`` in the memory-efficient kernel)."""
    return 4 * query.numel() + 4 * query.numel() // query.shape[-1]


def _beside_softmax_backward(gradient: torch.Tensor, *others: object) -> int:
    """Its result, and the gradient times the softmax (aten/native/cuda/SoftMax.cu)."""
    return 2 * gradient.numel() * gradient.element_size()


def _beside_safe_softmax(scores: torch.Tensor, *others: object) -> int:
    """Its result, and a byte for each -inf."""
    return scores.numel() * (scores.element_size() + 1)


# Bytes that an operator needs for a moment, beside its inputs.
BESIDE = {
    _aten._scaled_dot_product_flash_attention_backward.default: _beside_attention,
    _aten._scaled_dot_product_efficient_attention_backward.default: _beside_attention,
    _aten._softmax_backward_data.default: _beside_softmax_backward,
    _aten._safe_softmax.default: _beside_safe_softmax,
}


# Of these operators the result's layout is remembered, because PyTorch computes it in Python: half the time of a trace.
# A result is a new tensor, and its layout depends on nothing but the arguments' layouts and the numbers among them.
REMEMBERED = frozenset(
    (
        _aten.add.Tensor,
        _aten.mul.Tensor,
        _aten.mul.Scalar,
        _aten.div.Scalar,
        _aten.pow.Tensor_Scalar,
        _aten.mean.dim,
        _aten.sum.dim_IntList,
        _aten.rsqrt.default,
        _aten.neg.default,
    )
)


class _Layout(NamedTuple):
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


def _described(value: object) -> object:
    """Returns the argument of an operator as something that can be hashed: a tensor as its layout."""
    if isinstance(value, torch.Tensor):
        return _Layout(value.shape, value.stride(), value.dtype)
    return tuple(value) if isinstance(value, list) else value


@lru_cache(maxsize=4096, typed=True)
def _result_layout(func: Any, *args: Any) -> _Layout:
    result = func(*(arg.empty() if isinstance(arg, _Layout) else arg for arg in args))
    return _Layout(result.shape, result.stride(), result.dtype)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors: now, at the peak, and after every allocation; not those in ``apart``.
    ``smooth``: instead of rounding an allocation up to blocks, adds half a block, so that sizes grow smoothly."""

    def __init__(self, apart: Iterable[torch.Tensor] = (), smooth: bool = False) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.timeline: list[int] = []
        self.marks: dict[str, tuple[int, int]] = {}
        self._smooth = smooth
        # Kept alive, so that no new storage gets the same address.
        self._apart = [tensor.untyped_storage() for tensor in apart]
        self._known = {storage._cdata for storage in self._apart}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in REMEMBERED and not kwargs and not types and args[0].is_meta:
            out = _result_layout(func, *map(_described, args)).empty()
        else:
            out = func(*args, **(kwargs or {}))
        if func in BESIDE:
            self._reach(self.live + BESIDE[func](*args))
        for item in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(item, torch.Tensor):
                self._add(item)
        return out

    def mark(self, name: str) -> None:
        """Records the number of allocations so far and the live bytes under a name."""
        self.marks[name] = (len(self.timeline), self.live)

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or not tensor.is_meta:
            return
        size = storage.nbytes() + BLOCK // 2 if self._smooth else rounded_up(storage.nbytes())
        self._known.add(key)
        self.live += size
        self._reach(self.live)
        weakref.finalize(storage, self._free, key, size).atexit = False

    def _reach(self, size: int) -> None:
        self.peak = max(self.peak, size)
        self.timeline.append(size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size
