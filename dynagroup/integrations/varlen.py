"""Attention for packed batches in plain torch: a sample attends only to itself, and memory is linear in tokens. On CUDA
in half precision, torch 2.11 or later runs it as one call of ``torch.nn.attention.varlen``; else each sample is a call."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DataCollatorWithFlattening,
    PreTrainedModel,
)

from dynagroup.errors import ConfigError
from dynagroup.integrations.probe import (
    Model,
    answer,
    answers_alone,
    difference_beyond_rounding,
    samples_for,
)
from dynagroup.validation import explained

NAME = "dynagroup_varlen"
_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
HAS_KERNEL = _VERSION >= (2, 11)
HAS_GROUPS = _VERSION >= (2, 12)  # before, key and value heads are repeated
NO_MATTER = frozenset(
    "position_ids position_embeddings cache_position seq_idx cu_seq_lens_k max_length_k num_items_in_batch use_cache "
    "output_hidden_states output_router_logits return_dict logits_to_keep".split()
)
"""Arguments that models pass to their attention function, and that do not change its result."""
COLLATE = "collate with DataCollatorWithFlattening(return_flash_attn_kwargs=True)"
INSTEAD = "use attn_implementation='flash_attention_2' if the model has it, or the padded layout"
M = TypeVar("M", bound=Model)


def use_varlen_attention(model: M) -> M:
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
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _no_mask)
    name = type(model).__name__
    with explained(
        f"cannot compare packed attention with {name}'s own on two samples",
        ConfigError,
        way_out=f"; {INSTEAD}",
    ):
        samples = samples_for(model)
        alone = answers_alone(model, [torch.tensor([ids]) for ids in samples])
        settings = vars(model.config.get_text_config())
        before = dict(settings)
        difference = math.inf
        try:
            _set_attention(model)
            difference = _difference(model, samples, alone)
        finally:
            if difference:
                settings.clear()
                settings.update(before)
        if difference:
            raise ConfigError(
                f"{name} cannot use packed attention: its results are unequal by {difference:.1%} to those of "
                "its own attention (the model may add to the scores, or limit attention otherwise than by a "
                f"window); {INSTEAD}"
            )
    return model


def _set_attention(model: Model) -> None:
    """Sets the attention of those parts of a model that read tokens."""
    text = model.config.get_text_config()
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part.config is text:
            part.set_attn_implementation(NAME)


def _difference(model: Model, samples: list[list[int]], alone: list[torch.Tensor]) -> float:
    collate = DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, position_ids_start=first_position(model)
    )
    packed = answer(model, collate([{"input_ids": ids} for ids in samples]))
    return difference_beyond_rounding(model, packed, alone)


def attention_of(model: Model) -> str:
    """Returns the name of a model's attention for tokens."""
    return model.config.get_text_config()._attn_implementation or "eager"


def first_position(model: Model) -> int:
    """Returns the position of a sample's first token: models like RoBERTa count from one above their padding's index."""
    for layer in model.modules():
        if type(layer).__name__.endswith("Embeddings"):
            positions = getattr(layer, "position_embeddings", None)
            if isinstance(positions, torch.nn.Embedding) and positions.padding_idx is not None:
                return positions.padding_idx + 1
    return 0


def _no_mask(
    batch_size: int,
    q_length: int,
    *args: object,
    mask_function: Callable[..., torch.Tensor] | None = None,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: object,
) -> None:
    """Makes no mask, as transformers asks for one; refuses batches that need one."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ConfigError(
            f"packed attention cannot run a padded batch; {COLLATE}, or use the padded layout"
        )
    if mask_function is None or q_length < 2:
        return
    rows = torch.arange(batch_size, device=device)[:, None]
    places = torch.arange(q_length, device=device)
    sees_next = mask_function(rows, 0, places[:-1], places[1:])
    if bool(sees_next.any()) and not bool(sees_next.all()):
        raise ConfigError(
            "packed attention cannot let some tokens attend to later ones; use the padded layout"
        )


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Packed attention: query (B, H, T, D), key and value (B, H_kv, T, D) -> (B, T, H, D), as transformers expects."""
    _refuse_unknown(type(module).__name__, {**kwargs, "attention_mask": attention_mask})
    num_rows, _, num_tokens, _ = query.shape
    if num_tokens != key.shape[2]:
        raise ConfigError(
            "packed attention has no cache of keys; generate with model.set_attn_implementation('sdpa')"
        )
    borders = cu_seq_lens_q
    if borders is None:  # then the batch must not be packed: each row is one sample
        places = kwargs.get("position_ids")
        if places is not None and bool((places[:, 1:] <= places[:, :-1]).any()):
            raise ConfigError(f"a packed batch must say where its samples begin; {COLLATE}")
        borders = num_tokens * torch.arange(num_rows + 1, device=query.device, dtype=torch.int32)
        max_length_q = num_tokens
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    if query.is_cuda and query.itemsize == 2 and not dropout and HAS_KERNEL:
        longest = int(max_length_q or borders.diff().max())
        out = kernel(
            query, key, value, borders, longest, causal=causal, scale=scaling, window=sliding_window
        )
    else:
        out = one_by_one(
            query,
            key,
            value,
            borders,
            causal=causal,
            scale=scaling,
            window=sliding_window,
            dropout=dropout,
        )
    return out.unflatten(0, (num_rows, num_tokens)), None


def _refuse_unknown(layer: str, options: dict[str, object]) -> None:
    """Refuses arguments of a model's attention that would change its result."""
    unknown = []
    for name, value in options.items():
        if name not in NO_MATTER and value is not None and value is not False:
            unknown.append(f"`{name}`")
    if unknown:
        raise ConfigError(
            f"{layer} passes its attention {', '.join(unknown)}, which packed attention does not "
            f"support; {INSTEAD}"
        )


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
    """Computes the same result as :func:`one_by_one` in one call; only on CUDA devices, in half precision."""
    from torch.nn.attention.varlen import varlen_attn

    num_before = window - 1 if window else -1
    num_after = 0 if causal else num_before
    borders = borders.to(device=query.device, dtype=torch.int32)
    options: dict[str, Any] = {"window_size": (num_before, num_after), "scale": scale}
    groups = query.shape[1] // key.shape[1]
    if HAS_GROUPS:
        options["enable_gqa"] = groups > 1
    else:
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
    attn: Any = varlen_attn
    return attn(query, key, value, borders, borders, longest, longest, **options)


def one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    *,
    causal: bool,
    scale: float | None,
    window: int | None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Returns attention (T, H, D) of packed samples, one call per sample: exact on any device and dtype. ``causal``:
    only to earlier tokens; ``window``: only to tokens fewer than this apart; ``scale``: factor of the scores."""
    sizes = borders.diff().tolist()
    # One split for all samples, because the gradient of each slice would be as large as the batch.
    split = [x.transpose(0, 1)[None].split(sizes, dim=2) for x in (query, key, value)]
    parts = []
    for size, q, k, v in zip(sizes, *split, strict=True):
        mask = None
        if window is not None and size > window:
            mask = _window_mask(size, window, causal, q.device)
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=causal and mask is None and size > 1,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def _window_mask(size: int, window: int, causal: bool, device: torch.device) -> torch.Tensor:
    """Returns which tokens (column) each token (row) of a sample attends to, bool (size, size)."""
    place = torch.arange(size, device=device)
    back = place[:, None] - place[None]
    near = back.abs() < window
    return near & (back >= 0) if causal else near
