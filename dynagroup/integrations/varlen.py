"""Attention for packed batches in plain torch: a sample attends only to itself, and memory is linear in tokens. On CUDA
in half precision, torch 2.11 or later runs it as one call of ``torch.nn.attention.varlen``; else each sample is a call."""

import contextlib
import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, DataCollatorWithFlattening

from dynagroup.errors import ConfigError
from dynagroup.integrations.probe import (
    answer,
    answers_alone,
    difference_beyond_rounding,
    samples_for,
)
from dynagroup.validation import explained

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn: Any = lambda: None  # noqa: E731

TAKES = inspect.signature(varlen_attn).parameters.keys()
HAS_KERNEL, HAS_GROUPS = {"window_size", "scale"} <= TAKES, "enable_gqa" in TAKES
NAME, PROBE = "dynagroup_varlen", "dynagroup_probe"
NO_MATTER = frozenset(
    "position_ids position_embeddings cache_position seq_idx cu_seq_lens_k max_length_k num_items_in_batch use_cache "
    "output_hidden_states output_router_logits return_dict logits_to_keep".split()
)
"""Arguments that models pass to their attention function, and that do not change its result."""
COLLATE = "collate with DataCollatorWithFlattening(return_flash_attn_kwargs=True)"
INSTEAD = "use attn_implementation='flash_attention_2' if the model has it, or the padded layout"


def use_varlen_attention(model: Any) -> Any:
    """Gives a transformers model attention for packed batches; returns the model. Batches must be packed by
    ``DataCollatorWithFlattening(return_flash_attn_kwargs=True)``. Parts without tokens (vision) keep their attention.

    Two short samples are run packed, and each alone with the model's own attention before. Raises ConfigError, and
    changes nothing, if results are unequal (soft caps, sinks, chunks, biases), or cannot be compared; later, if a batch
    has a mask, images, or no borders.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> small = LlamaConfig(vocab_size=16, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8)
    >>> use_varlen_attention(LlamaForCausalLM(small)).config._attn_implementation
    'dynagroup_varlen'
    """
    asked = _checked_layers(model)
    parts = [part for part in model.modules() if hasattr(part, "set_attn_implementation")]
    kept = [
        (part.config, part.config._attn_implementation)
        for part in parts
        if not asked & {*part.modules()}
    ]
    model.set_attn_implementation(NAME)
    for config, attention in kept:
        config._attn_implementation = attention
    return model


def _checked_layers(model: Any) -> set[Any]:
    """Compares packed attention with the model's own on two samples; returns the layers that asked for attention."""
    name = type(model).__name__
    asked: set[Any] = set()
    AttentionInterface.register(NAME, _attend)
    AttentionInterface.register(PROBE, partial(_attend_and_note, asked))
    AttentionMaskInterface.register(NAME, _no_mask)
    AttentionMaskInterface.register(PROBE, _no_mask)
    with (
        explained(
            f"cannot compare packed attention with {name}'s own on two samples",
            ConfigError,
            way_out=f"; {INSTEAD}",
        ),
        settings_kept(model),
    ):
        samples = samples_for(model)
        device = next(model.parameters()).device
        wanted = answers_alone(model, [torch.tensor([ids], device=device) for ids in samples])
        model.set_attn_implementation(PROBE)
        collate = DataCollatorWithFlattening(
            return_flash_attn_kwargs=True, position_ids_start=first_position(model)
        )
        found = answer(model, collate([{"input_ids": ids} for ids in samples]))
        if not asked:
            raise ConfigError(
                f"{name} does not use transformers' AttentionInterface, so it cannot be packed; {INSTEAD}"
            )
        apart = difference_beyond_rounding(model, found, wanted)
    if apart:
        raise ConfigError(
            f"{name} cannot use packed attention: its results are unequal by {apart:.1%} to those of its own "
            f"attention (the model may add to the scores, or limit attention otherwise than by a window); {INSTEAD}"
        )
    return asked


def first_position(model: Any) -> int:
    """Returns the position of a sample's first token: models like RoBERTa count from one above their padding's index."""
    for layer in model.modules():
        padding = getattr(getattr(layer, "position_embeddings", None), "padding_idx", None)
        if type(layer).__name__.endswith("Embeddings") and padding is not None:
            return int(padding) + 1
    return 0


def _attend_and_note(asked: set[Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    asked.add(module)
    return _attend(module, *args, **kwargs)


@contextlib.contextmanager
def settings_kept(model: Any) -> Iterator[None]:
    """Context manager that restores a model's settings at its end."""
    configs = [
        config
        for part in model.modules()
        if hasattr(config := getattr(part, "config", None), "to_dict")
    ]
    before = [(vars(config), dict(vars(config))) for config in configs]
    try:
        yield
    finally:
        for settings, old in before:
            settings.clear()
            settings.update(old)


def _near(place: torch.Tensor, window: int | None, causal: bool) -> torch.Tensor:
    back = place[:, None] - place[None]
    near = torch.ones_like(back, dtype=torch.bool) if window is None else back.abs() < window
    return near & (back >= 0) if causal else near


def _no_mask(
    batch_size: int,
    q_length: int,
    *args: Any,
    mask_function: Any = None,
    attention_mask: Any = None,
    device: Any = "cpu",
    **kwargs: Any,
) -> None:
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ConfigError(
            f"packed attention cannot run a padded batch; {COLLATE}, or use the padded layout"
        )
    if mask_function is not None and q_length > 1:
        places = torch.arange(q_length, device=device)
        ahead = mask_function(
            torch.arange(batch_size, device=device)[:, None], 0, places[:-1], places[1:]
        )
        if bool(ahead.any()) and not bool(ahead.all()):
            raise ConfigError(
                "packed attention cannot let some tokens attend to later ones; use the padded layout"
            )


def _is_causal(module: Any, told: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True)) if told is None else told


def _attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Any = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Packed attention: query (B, H, T, D), key and value (B, H_kv, T, D) -> (B, T, H, D), as transformers expects."""
    options = {**kwargs, "attention_mask": attention_mask}
    if unknown := [
        f"`{k}`"
        for k, v in options.items()
        if k not in NO_MATTER and v is not None and v is not False
    ]:
        given = f"{type(module).__name__} passes its attention {', '.join(unknown)}"
        raise ConfigError(f"{given}, which packed attention does not support; {INSTEAD}")
    if query.shape[2] != key.shape[2]:
        raise ConfigError(
            "packed attention has no cache of keys; generate with model.set_attn_implementation('sdpa')"
        )
    if cu_seq_lens_q is None:
        # Without borders from the collator, the batch must not be packed: each row is one sample.
        (rows, _, tokens, _), places = query.shape, kwargs.get("position_ids")
        if places is not None and bool((places[:, 1:] <= places[:, :-1]).any()):
            raise ConfigError(f"a packed batch must say where its samples begin; {COLLATE}")
        cu_seq_lens_q, max_length_q = (
            torch.arange(rows + 1, device=query.device, dtype=torch.int32) * tokens,
            tokens,
        )
    how: dict[str, Any] = {
        "causal": _is_causal(module, is_causal),
        "scale": scaling,
        "window": sliding_window,
    }
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if query.is_cuda and query.dtype.itemsize == 2 and not dropout and HAS_KERNEL:
        out = kernel(q, k, v, cu_seq_lens_q, int(max_length_q or cu_seq_lens_q.diff().max()), **how)
    else:
        out = one_by_one(q, k, v, cu_seq_lens_q, dropout=dropout, **how)
    return out.unflatten(0, (query.shape[0], query.shape[2])), None


def kernel(
    query: Any, key: Any, value: Any, borders: torch.Tensor, longest: int, **how: Any
) -> Any:
    """Computes the same result as :func:`one_by_one` in one call; only on CUDA devices, in half precision."""
    groups = query.shape[1] // key.shape[1]
    grouped: Any = (
        {"enable_gqa": groups > 1} if HAS_GROUPS else {}
    )  # from torch 2.12 on; before, heads are repeated
    key, value = (
        x if groups == 1 or grouped else x.repeat_interleave(groups, dim=1) for x in (key, value)
    )
    near = how["window"] - 1 if how["window"] else -1
    window: Any = near, 0 if how["causal"] else near
    borders = borders.to(device=query.device, dtype=torch.int32)
    return varlen_attn(
        query,
        key,
        value,
        *2 * (borders,),
        *2 * (longest,),
        window_size=window,
        scale=how["scale"],
        **grouped,
    )


def one_by_one(
    query: Any,
    key: Any,
    value: Any,
    borders: Any,
    *,
    causal: bool,
    scale: Any,
    window: int | None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Returns attention (T, H, D) of packed samples, one call per sample: exact on any device and dtype. ``causal``:
    only to earlier tokens; ``window``: only to tokens fewer than this apart; ``scale``: factor of the scores."""
    parts, sizes = [], borders.diff().tolist()
    grouped = query.shape[1] != key.shape[1]
    # One split for all samples, because the gradient of each slice would be as large as the batch.
    samples = zip(
        sizes,
        *(x.transpose(0, 1)[None].split(sizes, dim=2) for x in (query, key, value)),
        strict=True,
    )
    for n, q, k, v in samples:
        near = (
            _near(torch.arange(n, device=q.device), window, causal)
            if window is not None and n > window
            else None
        )
        how = {
            "is_causal": causal and near is None and n > 1,
            "scale": scale,
            "enable_gqa": grouped,
        }
        parts.append(
            scaled_dot_product_attention(q, k, v, attn_mask=near, dropout_p=dropout, **how)[
                0
            ].transpose(0, 1)
        )
    return torch.cat(parts)
