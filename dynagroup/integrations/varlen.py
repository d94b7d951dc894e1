"""Attention of packed batches with torch alone: each sample attends to itself, in memory linear in the tokens.

transformers keeps packed samples apart with FlashAttention where that is installed, and with masks that are quadratic in the
*sum* of tokens elsewhere. This implementation, registered under a name of its own, is linear everywhere:
``torch.nn.attention.varlen`` on CUDA devices in half precision (torch 2.11 or later), sample after sample otherwise.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from dynagroup.errors import ConfigError
from dynagroup.oom.jobs import evaluating

__all__ = ["NAME", "check_own_attention", "settings_kept", "use_varlen_attention"]

NAME, PROBE = "dynagroup_varlen", "dynagroup_probe"
NO_MATTER = frozenset(
    "position_ids position_embeddings cache_position seq_idx cu_seq_lens_k max_length_k num_items_in_batch use_cache "
    "output_hidden_states output_router_logits return_dict logits_to_keep".split()
)
"""What models hand to their attention, and attention has no use for."""
PROBE_TOKENS, NEAR = 13, 4
WINDOWS = ("sliding_window", "sliding_window_size", "attention_chunk_size")
INSTEAD = "use attn_implementation='flash_attention_2' where the model has it, or the padded layout"


def use_varlen_attention(model: Any) -> Any:
    """Set a transformers model's attention to the packed kind; returns the model. Its batches must be packed by
    ``DataCollatorWithFlattening(return_flash_attn_kwargs=True)``. Parts that read no tokens (vision) keep their attention.

    Raises:
        ConfigError: :func:`check_own_attention` refuses the model; later, at a batch: it has a mask, images whose tokens look
            ahead, or does not hand the borders on.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> small = LlamaConfig(vocab_size=16, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8)
    >>> use_varlen_attention(LlamaForCausalLM(small)).config._attn_implementation
    'dynagroup_varlen'
    """
    asked = check_own_attention(model)
    parts = [part for part in model.modules() if hasattr(part, "set_attn_implementation")]
    kept = [(part.config, part.config._attn_implementation) for part in parts if not asked & {*part.modules()}]
    model.set_attn_implementation(NAME)
    for config, attention in kept:
        config._attn_implementation = attention
    return model


# What: one forward pass of a few tokens, in which each layer's attention is computed twice from the same queries, keys and
#   values: by the model's own function (the "eager" one of its file, with the masks that it makes), and by ours.
# Why right: these are random and large instead of the layer's, so that what weights as they are do not show (a soft cap over
#   small scores, a sink of zero) does; windows and chunks are shortened so that a few tokens are longer than they are.
# Cost: that pass, on the model's device. The model is afterwards as it was.
def check_own_attention(model: Any) -> set[Any]:
    """Compare packed attention with the model's own, layer by layer; returns the modules that attend.

    Raises:
        ConfigError: the two differ (soft caps, sinks, chunks, biases, ...), or cannot be compared.
    """
    name, asked = type(model).__name__, set()
    if not hasattr(model, "set_attn_implementation"):
        raise ConfigError(
            f"`model` must be a transformers model with a choice of attention, but is {name}; use the padded layout"
        )
    if next(model.parameters()).is_meta:
        raise ConfigError(f"{name} has no weights yet, so its attention cannot be compared; load them first")
    _register(partial(_attend_both, asked))
    try:
        with settings_kept(model), evaluating(model), torch.no_grad():
            _shorten(model)
            model.set_attn_implementation(PROBE)
            ids = torch.arange(PROBE_TOKENS, device=next(model.parameters()).device) % 5 + 5
            model(input_ids=ids[None])
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"packed attention could not be compared with {name}'s own on {PROBE_TOKENS} tokens "
            f"({type(error).__name__}: {error}); {INSTEAD}"
        ) from error
    if not asked:
        raise ConfigError(f"{name} does not let its attention be chosen by transformers' AttentionInterface; {INSTEAD}")
    return asked


def _register(probe: Callable[..., Any]) -> None:
    for name, attention, mask in ((NAME, _attend, _no_mask), (PROBE, probe, eager_mask)):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, mask)


def _owners(model: Any) -> list[Any]:
    """What holds a model's settings, each once: its configs, and modules that know their window."""
    found = [config for part in model.modules() if hasattr(config := getattr(part, "config", None), "to_dict")]
    windowed = (part for part in model.modules() if _number(vars(part).get("sliding_window")))
    return [*{id(config): config for config in found}.values(), *windowed]


@contextlib.contextmanager
def settings_kept(model: Any) -> Iterator[None]:
    """Afterwards a model's settings are what they were."""
    before = [(vars(owner), dict(vars(owner))) for owner in _owners(model)]
    try:
        yield
    finally:
        for settings, old in before:
            settings.clear()
            settings.update(old)


def _shorten(model: Any) -> None:
    """Windows and chunks of a few tokens, and no cache."""
    owners = _owners(model)
    sizes = {_number(getattr(owner, name, None)) for owner in owners if hasattr(owner, "to_dict") for name in WINDOWS}
    for owner in owners:
        for name in WINDOWS:
            if size := _number(getattr(owner, name, None)):
                more = min((size - other for other in sizes - {0}), key=abs, default=0)  # some count the token itself
                setattr(owner, name, min(size, NEAR + more))
        if hasattr(owner, "use_cache"):
            owner.use_cache = False


def _number(value: Any) -> int:
    """A size, or 0 for what is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _attend_both(
    asked: set[Any], module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **options: Any
) -> tuple[torch.Tensor, None]:
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is None:
        raise ConfigError(f"{type(module).__name__} has no attention of its own to compare with; {INSTEAD}")
    seed = torch.Generator().manual_seed(len(asked))
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (2 * torch.randn(x.shape, generator=seed).to(x.device, wide) for x in (query, key, value))
    wanted = own(module, q, k, v, attention_mask, **options)[0]
    apart = float((_attend(module, q, k, v, **options)[0] - wanted).abs().max() / wanted.abs().max())
    if not apart < (1e-2 if wanted.is_cuda else 1e-4):
        raise ConfigError(
            f"{type(module).__name__} does more than packed attention does: the two are {apart:.1%} apart (it adds to the "
            f"scores, or limits what a token sees by other than a window); {INSTEAD}"
        )
    asked.add(module)
    return wanted.to(query.dtype), None


def _no_mask(
    batch_size: int, q_length: int, *args: Any, mask_function: Any = None, attention_mask: Any = None, device: Any = "cpu",
    **kwargs: Any,
) -> None:  # fmt: skip
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ConfigError(
            "packed attention was given a padded batch; collate with "
            "DataCollatorWithFlattening(return_flash_attn_kwargs=True), or use the padded layout"
        )
    if mask_function is not None and q_length > 1:
        places = torch.arange(q_length, device=device)
        ahead = mask_function(torch.arange(batch_size, device=device)[:, None], 0, places[:-1], places[1:])
        if bool(ahead.any()) and not bool(ahead.all()):
            raise ConfigError(
                "some tokens look ahead and others do not, as tokens of an image do: packed attention knows no such mask; "
                "use the padded layout"
            )


def _attend(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, *, scaling: float | None = None,
    dropout: float = 0.0, sliding_window: int | None = None, is_causal: bool | None = None, cu_seq_lens_q: Any = None,
    max_length_q: int | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Query (B, H, T, D), key and value (B, H_kv, T, D) -> (B, T, H, D), as transformers' attention functions have it."""
    given = {**kwargs, "attention_mask": attention_mask}
    if unknown := [f"`{k}`" for k, v in given.items() if k not in NO_MATTER and v is not None and v is not False]:
        raise ConfigError(
            f"{type(module).__name__} gives its attention {', '.join(unknown)}, which packed attention does not understand; "
            + INSTEAD
        )
    if query.shape[2] != key.shape[2]:
        raise ConfigError("packed attention has no cache of keys; generate with model.set_attn_implementation('sdpa')")
    if cu_seq_lens_q is None:
        cu_seq_lens_q, max_length_q = _rows_as_samples(query, kwargs.get("position_ids"))
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    how: dict[str, Any] = {"causal": causal, "scale": scaling, "window": sliding_window}
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if query.is_cuda and query.dtype.itemsize == 2 and not dropout and has_kernel():
        out = kernel(q, k, v, cu_seq_lens_q, int(max_length_q or cu_seq_lens_q.diff().max()), **how)
    else:
        out = one_by_one(q, k, v, cu_seq_lens_q, dropout=dropout, **how)
    return out.unflatten(0, (query.shape[0], query.shape[2])), None


def _rows_as_samples(query: torch.Tensor, position_ids: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """Borders where the collator gave none: a batch that is no pack has one sample a row."""
    rows, tokens = query.shape[0], query.shape[2]
    if position_ids is not None and bool((position_ids[:, 1:] <= position_ids[:, :-1]).any()):
        raise ConfigError(
            "the batch is packed, but does not say where its samples begin; collate with "
            "DataCollatorWithFlattening(return_flash_attn_kwargs=True)"
        )
    return torch.arange(rows + 1, device=query.device, dtype=torch.int32) * tokens, tokens


@cache
def has_kernel() -> bool:
    """Whether torch has the kernel, and the kernel windows and scales."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"window_size", "scale"} <= inspect.signature(varlen_attn).parameters.keys()


def kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, borders: torch.Tensor, longest: int, *, causal: bool,
    scale: float | None, window: int | None,
) -> Any:  # fmt: skip
    """What :func:`one_by_one` gives, in one call: on CUDA devices, in half precision."""
    from torch.nn.attention.varlen import varlen_attn

    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    near = window - 1 if window else -1
    borders = borders.to(device=query.device, dtype=torch.int32)
    how: Any = {"window_size": (near, 0 if causal else near), "scale": scale}
    return varlen_attn(query, key, value, borders, borders, longest, longest, **how)


def one_by_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, borders: torch.Tensor, *, causal: bool,
    scale: float | None, window: int | None, dropout: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """(T, H, D) -> (T, H, D), a sample at a time: exact on any device and dtype; its cost is one call a sample and layer.

    A query scores keys before it only (``causal``), times ``scale``, fewer than ``window`` tokens away.
    """
    parts, marks = [], borders.tolist()
    grouped = query.shape[1] != key.shape[1]
    for start, stop in zip(marks[:-1], marks[1:], strict=True):
        q, k, v = (x[start:stop].transpose(0, 1)[None] for x in (query, key, value))
        near = None
        if window is not None and stop - start > window:
            place = torch.arange(stop - start, device=q.device)
            back = place[:, None] - place[None]
            near = (back < window) & (back >= 0) if causal else back.abs() < window
        how = {"is_causal": causal and near is None and stop - start > 1, "scale": scale, "enable_gqa": grouped}
        parts.append(scaled_dot_product_attention(q, k, v, attn_mask=near, dropout_p=dropout, **how)[0].transpose(0, 1))
    return torch.cat(parts)
