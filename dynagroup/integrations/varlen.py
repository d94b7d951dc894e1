"""Attention of packed batches with torch alone: each sample attends to itself, in memory linear in the tokens.

transformers keeps packed samples apart with FlashAttention where that is installed, and with masks that are quadratic in the
*sum* of tokens elsewhere. This implementation, registered under a name of its own, is linear everywhere:
``torch.nn.attention.varlen`` on CUDA devices in half precision (torch 2.10 or later), sample after sample otherwise.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any

from dynagroup.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["NAME", "use_varlen_attention"]

NAME = "dynagroup_varlen"


def use_varlen_attention(model: Any) -> Any:
    """Set a transformers model's attention to the packed kind; returns the model.

    Its batches must be packed by ``transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)``: one row, with
    ``position_ids``, ``cu_seq_lens_q`` and the like, and no ``attention_mask``.

    Raises:
        ConfigError: the model cannot be given an attention implementation; later, at its first batch: it has a padding mask,
            wants dropout in attention where the kernel has none, or does not hand the borders on.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> small = LlamaConfig(vocab_size=8, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8)
    >>> use_varlen_attention(LlamaForCausalLM(small)).config._attn_implementation
    'dynagroup_varlen'
    """
    if not hasattr(model, "set_attn_implementation"):
        raise ConfigError(
            f"`model` must be a transformers model with a choice of attention, but is {type(model).__name__}; "
            "use the padded layout for it"
        )
    _register()
    model.set_attn_implementation(NAME)
    return model


@cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> None:
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ConfigError(
            "packed attention was given a padded batch; collate with "
            "DataCollatorWithFlattening(return_flash_attn_kwargs=True), or use the padded layout"
        )


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Query (B, H, T, D), key and value (B, H_kv, T, D) -> (B, T, H, D), as transformers' attention functions have it."""
    if query.shape[2] != key.shape[2]:
        raise ConfigError("packed attention has no cache of keys; generate with model.set_attn_implementation('sdpa')")
    if cu_seq_lens_q is None:
        cu_seq_lens_q, max_length_q = _rows_as_samples(query, kwargs.get("position_ids"))
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if query.is_cuda and query.dtype.itemsize == 2 and not dropout:
        longest = int(max_length_q or cu_seq_lens_q.diff().max())
        out = kernel(q, k, v, cu_seq_lens_q, longest, causal=causal, scale=scaling, window=sliding_window)
    else:
        out = one_by_one(q, k, v, cu_seq_lens_q, causal=causal, scale=scaling, window=sliding_window, dropout=dropout)
    return out.unflatten(0, (query.shape[0], query.shape[2])), None


def _rows_as_samples(query: torch.Tensor, position_ids: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """Borders where the collator gave none: a batch that is no pack has one sample a row."""
    import torch

    rows, tokens = query.shape[0], query.shape[2]
    if position_ids is not None and bool((position_ids[:, 1:] <= position_ids[:, :-1]).any()):
        raise ConfigError(
            "the batch is packed, but does not say where its samples begin; collate with "
            "DataCollatorWithFlattening(return_flash_attn_kwargs=True)"
        )
    return torch.arange(rows + 1, device=query.device, dtype=torch.int32) * tokens, tokens


def kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    longest: int,
    *,
    causal: bool,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    import torch
    from torch.nn.attention.varlen import varlen_attn

    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (window - 1 if window else -1, 0 if causal else -1)}
    if "window_size" not in known:  # torch 2.10
        if window is not None:
            raise ConfigError("sliding windows in packed attention need torch 2.11 or later")
        options = {"is_causal": causal}
    if scale is not None:
        if "scale" in known:
            options["scale"] = scale
        else:
            query = query * (scale * query.shape[-1] ** 0.5)
    borders = borders.to(device=query.device, dtype=torch.int32)
    out: Any = varlen_attn(query, key, value, borders, borders, longest, longest, **options)
    return out


def one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    *,
    causal: bool,
    scale: float | None,
    window: int | None,
    dropout: float,
) -> torch.Tensor:
    """(T, H, D) -> (T, H, D), a sample at a time: exact on any device and dtype; its cost is one call a sample and layer."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    marks = borders.tolist()
    parts = []
    for start, stop in zip(marks[:-1], marks[1:], strict=True):
        q, k, v = (x[start:stop].transpose(0, 1)[None] for x in (query, key, value))
        near = None
        if window is not None and stop - start > window:
            place = torch.arange(stop - start, device=q.device)
            back = place[:, None] - place[None]
            near = (back < window) & (back >= 0) if causal else back.abs() < window
        parts.append(
            scaled_dot_product_attention(
                q, k, v, attn_mask=near, dropout_p=dropout, is_causal=causal and near is None and stop - start > 1,
                scale=scale, enable_gqa=query.shape[1] != key.shape[1],
            )[0].transpose(0, 1)
        )  # fmt: skip
    return torch.cat(parts)
