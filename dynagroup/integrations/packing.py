"""Makes the collator for packed batches of a transformers model, and tests that the model keeps the samples apart.

If a model cannot process packed batches, transformers raises no error: samples attend to each other or get wrong
positions, while the loss looks normal. So the model itself is tested, on two samples of a few tokens. Some models
compress blocks of tokens (DeepSeek-V4: 4 or 128), so the samples are longer than the blocks that the config names."""

import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers import DataCollatorWithFlattening

from dynagroup.errors import ConfigError
from dynagroup.integrations.varlen import NAME, check_own_attention
from dynagroup.oom.jobs import evaluating
from dynagroup.update.split_test import skips_first_label
from dynagroup.validation import explained, warn_user

LINEAR = (
    "flash_attention",
    "flex_attention",
    NAME,
)  # kinds of attention that keep samples apart without a mask
Collate: TypeAlias = Callable[[Sequence[Any]], dict[str, Any]]
PROBES = ((7, 5, 6, 9, 8), (6, 8, 5))
WEAK, STRONG = (
    0.3,
    8.0,
)  # a matrix whose root mean square, times the root of its width, is below or above is replaced
LONGEST_BLOCK = 1024  # larger numbers in a config are no blocks, or too large to be tried
WAYS_OUT = (
    "set model.config.use_cache = False (with a cache, transformers makes no mask between packed samples), "
    "call dynagroup.integrations.varlen.use_varlen_attention(model), or use the padded layout"
)


def packing_collator(model: Any, **options: Any) -> Collate:
    """Returns a ``transformers.DataCollatorWithFlattening`` for this model, after a test that its packed batches work.
    It also packs other values per token that the model reads (``token_type_ids``), and keeps the first label of each
    sample if the model's loss reads it, as that of an encoder does. Called with other fields or padding: ConfigError.

    Args:
        model: a transformers model as it will be trained, with its attention implementation. See :func:`check_packing`.
        options: arguments of the collator, such as ``return_seq_idx=True`` for state-space models.
    """
    if not hasattr(model, "config") or not isinstance(model, torch.nn.Module):
        raise ConfigError(f"`model` must be a model of transformers, but is {model!r:.80}")
    # Models like RoBERTa count positions from one above their padding token's index.
    layers = [module for module in model.modules() if type(module).__name__.endswith("Embeddings")]
    padding = [
        getattr(getattr(layer, "position_embeddings", None), "padding_idx", None)
        for layer in layers
    ]
    first = next(
        ({"position_ids_start": int(index) + 1} for index in padding if index is not None), {}
    )
    collate = _Flattening(
        model, {"return_flash_attn_kwargs": _is_linear(model), **first, **options}
    )
    check_packing(model, collate)
    return collate


class _Flattening(DataCollatorWithFlattening):
    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        super().__init__(**options)
        own = (
            model.get_base_model() if hasattr(model, "get_base_model") else model
        )  # without adapters
        self.read = {*inspect.signature(own.forward).parameters} - {"input_ids", "position_ids"}
        self.shifts = skips_first_label(model)  # then the loss never reads a first label

    def __call__(
        self, features: Any, return_tensors: Any = None, separator_id: Any = None
    ) -> dict[str, Any]:
        sizes, given = (
            [len(f["input_ids"]) for f in features],
            {name for f in features for name in f},
        )
        rows = {
            name: [np.asarray(sample.get(name)) for sample in features]
            for name in given & self.read
        }
        for name, values in sorted(rows.items()):
            alike = [row.shape for row in values] == [(n,) for n in sizes]
            if not alike or (name == "attention_mask" and not np.hstack(values).all()):
                way_out = (
                    "give every sample one value per token and no padding, or use the padded layout"
                )
                raise ConfigError(
                    f"cannot pack the field {name!r}, which the model reads; {way_out}"
                )
        made: Any = super().__call__(features, return_tensors, separator_id)
        made["labels"] = made["labels"][
            :, [n > 0 for n in sizes for _ in range(max(n, 1))]
        ]  # samples without tokens
        for name in rows.keys() - {"attention_mask", *(["labels"] if self.shifts else [])}:
            packed = np.concatenate(
                [np.zeros(0, np.int64), *(row for row in rows[name] if len(row))]
            )[None]
            made[name] = (
                torch.as_tensor(packed) if isinstance(made["input_ids"], torch.Tensor) else packed
            )
        if not self.shifts and "labels" not in given:
            del made["labels"]  # would be the ids
        return made


class NotAskedError(ConfigError):
    """Raised when a model or collator cannot be tested, because it needs more than rows of tokens."""


def check_packing(model: Any, collate_fn: Collate) -> None:
    """Runs two short samples packed and one by one, and checks that the model gives equal results. The model is not
    changed. After ``use_varlen_attention`` its results are also compared with the model's own attention. Raises
    ConfigError if the model cannot run these samples, or results differ because attention or a cache mixes them."""
    name, attention = (
        type(model).__name__,
        getattr(model.config, "_attn_implementation", None) or "eager",
    )
    if attention == NAME:  # may have been set by name, without a test
        check_own_attention(model)
    tried = f"{name} cannot run two packed samples of `input_ids`"
    can = "; only models that read one row of tokens can be packed, so use the padded layout"
    with explained(tried, ConfigError, way_out=can, kind=NotAskedError), ExitStack() as kept:
        for own, key in [
            (vars(m), n) for m in model.modules() for n in vars(m) if "floor" in n
        ]:  # 8,192 in Llama 4
            kept.callback(own.__setitem__, key, own[key])
            own[key] = 1
        together, alone = _answers(model, collate_fn)
        apart, in_all, limit = *differences(together, alone), _rounding(model, alone)
    if not (
        apart <= limit and in_all <= max(limit / 2, 1e-2)
    ):  # in half precision, rounding is at most 0.02 in both
        rows = "its positions, or layers that run along the row, do not restart at each sample"
        why = rows if _is_linear(model) else f"its attention {attention!r} mixes them"
        found = (
            f"{name} gives other results for packed samples than for each alone (by {apart:.1%})"
        )
        raise ConfigError(f"{found}, because {why}; {WAYS_OUT}")


def check_packed_training(trainer: Any) -> None:
    """Runs :func:`check_packing` on what a Trainer will train; warns if a model or collator cannot be tested."""
    why = "the model is sharded, or not on its device yet"
    if not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        try:
            with trainer.accelerator.autocast():
                return check_packing(trainer.model, trainer.data_collator)
        except NotAskedError as error:
            why = str(error)
    way_out = "call dynagroup.integrations.packing.check_packing(model, collate_fn) yourself"
    warn_user(f"cannot test whether the model keeps packed samples apart; {way_out} ({why})")


def _answers(model: Any, collate_fn: Collate) -> tuple[torch.Tensor, torch.Tensor]:
    named = re.findall(r"(?:compress|block_size)\w*': (\d+)", str(model.config.to_dict()))
    sizes = [
        len(p) + max((int(size) for size in named if int(size) <= LONGEST_BLOCK), default=0)
        for p in PROBES
    ]
    probes = [(probe * size)[:size] for probe, size in zip(PROBES, sizes, strict=True)]
    batch = collate_fn([{"input_ids": list(ids), "labels": list(ids)} for ids in probes])
    if (shape := (*batch["input_ids"].shape,)) != (1, sum(sizes)):
        raise ConfigError(
            f"`collate_fn` must pack {sum(sizes)} tokens, but made {shape}; use packing_collator(model)"
        )
    together = answer(model, batch, weak := _usual(model))
    parts = batch["input_ids"].split(
        sizes, dim=1
    )  # taken from the packed row, because a collator may mask tokens
    alone = torch.cat([answer(model, {"input_ids": part}, weak) for part in parts], dim=1)
    if together.shape != alone.shape:
        raise ConfigError(
            f"{type(model).__name__} has no output per token and cannot be packed; use padded layout"
        )
    if alone.isnan().any():
        raise ValueError("its results are not numbers (NaN)")
    return together, alone


def differences(found: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float]:
    """Returns the largest difference and that of all values, relative; without words that no token predicts (Chameleon)."""
    told = (wanted != wanted[..., :1, :]).flatten(0, -2).any(0)
    gap, wanted = (found - wanted)[..., told].float(), wanted[..., told].float()
    return float(gap.abs().max() / wanted.abs().max()), float(gap.norm() / wanted.norm())


def _usual(model: Any) -> dict[str, torch.Tensor]:
    """Returns weights of usual size for matrices that do almost nothing yet, or so much that attention is sharp."""
    wide = {
        n: p.data
        for n, p in model.named_parameters()
        if p.dim() > 1 and p.is_floating_point() and p.itemsize > 1
    }
    odd = {
        n: p
        for n, p in wide.items()
        if not WEAK <= p.norm() / (p.numel() / p.shape[-1]) ** 0.5 <= STRONG
    }
    waves = {
        name: torch.arange(p.numel(), device=p.device).square().sin() for name, p in odd.items()
    }
    return {
        name: (waves[name].view_as(p) / p.shape[-1] ** 0.5).to(p.dtype) for name, p in odd.items()
    }


def answer(model: Any, batch: dict[str, Any], weights: Any = None) -> torch.Tensor:
    """Returns a model's logits, or without logits its first output; ``weights``: used instead of its own, by name."""
    device = next(model.parameters()).device
    inputs = {
        k: v.to(device) if isinstance(v, torch.Tensor) else v
        for k, v in batch.items()
        if k != "labels"
    }
    with evaluating(model), torch.no_grad():
        output = (
            torch.func.functional_call(model, weights, (), inputs) if weights else model(**inputs)
        )
    return output.logits if getattr(output, "logits", None) is not None else output[0]


def _rounding(model: Any, answer: Any) -> float:
    """Returns the largest difference that rounding may cause, relative to the largest number in a result."""
    widths = [answer.dtype.itemsize, next(model.parameters()).dtype.itemsize]
    if min(widths) < 4 or torch.is_autocast_enabled(answer.device.type):
        return 5e-2
    return (
        5e-3
        if answer.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
        else 5e-5
    )


def _is_linear(model: Any) -> bool:
    return any(name in str(getattr(model.config, "_attn_implementation", None)) for name in LINEAR)
