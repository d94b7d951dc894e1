"""Runs ``model.generate`` in parts when memory runs out, with the same output."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from dynagroup.attention import AttentionBackends, attention_kernels, check_attention_backends
from dynagroup.budget.learning import LearningBudget
from dynagroup.errors import ConfigError
from dynagroup.oom.retry import Retry
from dynagroup.oom.take import BatchSplitter, longest_of
from dynagroup.shapes import BatchShape

_REFUSED = (
    "streamer",
    "synced_gpus",
    "return_dict_in_generate",
    "past_key_values",
    "encoder_outputs",
    "prefix_allowed_tokens_fn",
)
_NEW_TOKENS = 20  # transformers' default
_learned_by_model: WeakKeyDictionary[Any, LearningBudget] = WeakKeyDictionary()


class Generated(NamedTuple):
    """Token ids of the whole batch, and how many times the batch was split."""

    output: torch.Tensor
    num_splits: int


def generate_with_oom_retry(
    model: Any,
    batch: Any,
    *,
    min_samples: int = 1,
    pad_token_id: int | None = None,
    learned: LearningBudget | None = None,
    indices: Sequence[int] = (),
    attention_backends: AttentionBackends = "auto",
    **generate_kwargs: Any,
) -> Generated:
    """Returns ``model.generate(**batch, **generate_kwargs)``; runs the batch in parts if it does not fit in memory.

    The output is as without splitting: samples in input order, with the same padding. Greedy and beam search give the
    same tokens; sampling draws other random numbers. Sizes that ran out of memory once are split in advance.

    Args:
        batch: what the tokenizer or processor returned, or input ids, int (samples, tokens).
        min_samples: int: a part with fewer than twice this many samples is not split.
        pad_token_id: int, fills the end of finished samples. None: the model's, else its first end-of-sequence token.
        learned: the :class:`LearningBudget` that learns from failures. None: one per model, kept as long as the model.
        indices: dataset indices of the samples, to name them in messages.
        attention_backends: which kernels ``scaled_dot_product_attention`` may use. "auto": all but cuDNN's, which on an
            H100, H200 or B200 takes half a second for each new shape. None: torch chooses. A list of
            ``torch.nn.attention.SDPBackend``: these.

    Raises BudgetError if a part that cannot be split does not fit (the message names its samples); ConfigError if an
    option does not work in parts: streamer, ``synced_gpus``, ``return_dict_in_generate``, a cache.

    >>> output, num_splits = generate_with_oom_retry(model, batch, max_new_tokens=64)  # doctest: +SKIP
    """
    data = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
    options = dict(generate_kwargs)
    if pad_token_id is not None:
        options["pad_token_id"] = pad_token_id
    for name, value in generate_kwargs.items():
        if is_data(value):
            data[name] = options.pop(name)
    check_options(model, {**data, **options})
    check_attention_backends(attention_backends)
    retry = Retry(
        # Parts keep the batch's width, because some options of `generate` depend on padding, or count from the left.
        splitter=BatchSplitter(trim=False),
        learned=learned or _learned_by_model.setdefault(model, LearningBudget()),
        min_samples=min_samples,
        shape=partial(_final_shape, model, options),
    )
    with attention_kernels(attention_backends, varies=True):
        parts = retry.run(lambda part: model.generate(**part, **options), data, indices)
    return Generated(_joined(parts, model, options), len(parts) - 1)


def _joined(parts: list[torch.Tensor], model: Any, options: Mapping[str, Any]) -> torch.Tensor:
    """Returns the parts' outputs as one tensor: shorter ones are filled at the end, as ``generate`` fills them."""
    width = max(part.shape[1] for part in parts)
    if all(part.shape[1] == width for part in parts):
        return torch.cat(parts)
    fill = _pad_token_id(model, options)
    rows = []
    for part in parts:
        rows.append(torch.nn.functional.pad(part, (0, width - part.shape[1]), value=fill))
    return torch.cat(rows)


def _final_shape(
    model: Any, options: Mapping[str, Any], part: Mapping[str, Any], num_samples: int
) -> BatchShape:
    """Returns the shape of a batch when generation ends: rows with beams or several answers, and all new tokens."""
    width = longest_of(part)
    num_new = generation_option("max_new_tokens", model, options)
    max_length = generation_option("max_length", model, options)
    if num_new is None and max_length is None:
        num_new = _NEW_TOKENS
    elif num_new is None:
        num_new = max_length if model.config.is_encoder_decoder else max(max_length - width, 0)
    return BatchShape.of(num_samples * num_copies(model, options), width + num_new)


def num_copies(model: Any, options: Mapping[str, Any]) -> int:
    """Returns how many rows ``generate`` runs for each sample: beams, or several answers."""
    num_beams = generation_option("num_beams", model, options) or 1
    num_answers = generation_option("num_return_sequences", model, options) or 1
    return max(num_beams, num_answers)


def _pad_token_id(model: Any, options: Mapping[str, Any]) -> int:
    pad = generation_option("pad_token_id", model, options)
    end = generation_option("eos_token_id", model, options)
    if isinstance(end, (list, tuple)):
        end = end[0]
    has_beams = (generation_option("num_beams", model, options) or 1) > 1
    if pad is None or (pad == 0 and has_beams and end is not None):
        pad = end  # in beam search, transformers treats a padding token of 0 as not set
    if pad is None:
        raise ConfigError(
            "parts have outputs of unequal length; pass `pad_token_id`, which fills the shorter ones"
        )
    return int(pad)


def check_options(model: Any, options: Mapping[str, Any]) -> None:
    """Raises ConfigError for options that do not work in parts, also those in the model's generation config."""
    for name in _REFUSED:
        if generation_option(name, model, options) not in (None, False):
            raise ConfigError(
                f"`{name}` does not work when a batch may run in parts; use model.generate instead"
            )


def generation_option(name: str, model: Any, options: Mapping[str, Any]) -> Any:
    """Returns the value of an option of ``generate``: argument, ``generation_config``, or the model's; else None."""
    if options.get(name) is not None:
        return options[name]
    for config in (options.get("generation_config"), model.generation_config):
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None


def is_data(value: Any) -> bool:
    """Returns whether an argument of ``generate`` has one entry per sample, and so is a part of the batch."""
    return isinstance(value, torch.Tensor) and value.ndim > 0
