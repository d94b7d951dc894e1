"""Runs ``model.generate`` in parts when memory runs out, with the same output."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from dynagroup.budget.learning import LearningBudget
from dynagroup.errors import ConfigError
from dynagroup.oom.retry import run_parts
from dynagroup.oom.split import BatchSplitter, VisionTokens, longest_of
from dynagroup.shapes import BatchShape

_REFUSED = (
    "streamer",
    "synced_gpus",
    "return_dict_in_generate",
    "past_key_values",
    "encoder_outputs",
    "prefix_allowed_tokens_fn",
)
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

    Raises BudgetError if a part that cannot be split does not fit (the message names its samples); ConfigError if an
    option does not work in parts: streamer, ``synced_gpus``, ``return_dict_in_generate``, a cache.

    >>> output, num_splits = generate_with_oom_retry(model, batch, max_new_tokens=64)  # doctest: +SKIP
    """
    data = {**batch} if isinstance(batch, Mapping) else {"input_ids": batch}
    check_options(model, {**data, **generate_kwargs})
    if pad_token_id is not None:
        generate_kwargs["pad_token_id"] = pad_token_id
    if learned is None:
        learned = _learned_by_model.setdefault(model, LearningBudget())
    return generated(model, data, generate_kwargs, learned, indices, min_samples=min_samples)


def generated(
    model: Any,
    batch: Mapping[str, Any],
    options: Mapping[str, Any],
    learned: LearningBudget,
    indices: Sequence[int],
    *,
    min_samples: int = 1,
) -> Generated:
    """Returns the output of the whole batch, joined from its parts. ``options``: checked arguments of ``generate``."""
    kwargs = {name: value for name, value in options.items() if not is_data(value)}
    batch = {**batch, **{name: value for name, value in options.items() if name not in kwargs}}
    option = partial(generation_option, model=model, kwargs=kwargs)
    # Parts keep the batch's width, because some options of `generate` depend on padding, or count from the left.
    splitter = BatchSplitter(trim=False, vision=VisionTokens.from_config(model.config))
    shape = partial(_final_shape, option, model.config.is_encoder_decoder)
    run = lambda part: model.generate(**part, **kwargs)  # noqa: E731
    how: Any = {
        "min_samples": min_samples,
        "indices": indices,
        "shape": shape,
    }
    rows = run_parts(run, batch, splitter, learned, **how)
    if len(rows) == 1:
        return Generated(rows[0], 0)
    width = max(part.shape[1] for part in rows)
    fill = _pad_token_id(option) if any(part.shape[1] < width for part in rows) else 0
    ended = [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=fill) for part in rows]
    return Generated(torch.cat(ended), len(rows) - 1)


def _final_shape(
    option: Callable[[str], Any], is_encoder_decoder: bool, part: Any, num_samples: int
) -> BatchShape:
    new, total, width = option("max_new_tokens"), option("max_length"), longest_of(part)
    if new is None and total is not None:
        new = total if is_encoder_decoder else max(total - width, 0)
    new = 20 if new is None else new  # transformers' default
    return BatchShape.of(
        num_samples * max(option(name) or 1 for name in ("num_beams", "num_return_sequences")),
        width + new,
    )


def _pad_token_id(option: Callable[[str], Any]) -> int:
    pad, eos = option("pad_token_id"), option("eos_token_id")
    first_eos = eos[0] if isinstance(eos, (list, tuple)) else eos
    if pad is None or (pad == 0 and (option("num_beams") or 1) > 1 and first_eos is not None):
        pad = first_eos  # in beam search, transformers treats a padding token of 0 as not set
    if pad is None:
        raise ConfigError(
            "parts have outputs of unequal length; pass `pad_token_id`, which fills the shorter ones"
        )
    return int(pad)


def check_options(model: Any, given: Mapping[str, Any]) -> None:
    """Raises ConfigError for options that do not work in parts, also those in the model's generation config."""
    for name in _REFUSED:
        if generation_option(name, model, given) not in (None, False):
            raise ConfigError(
                f"`{name}` does not work when a batch may run in parts; use model.generate instead"
            )


def generation_option(name: str, model: Any, kwargs: Mapping[str, Any]) -> Any:
    """Returns the value of an option of ``generate``: argument, ``generation_config``, or the model's; else None."""
    for source in (
        kwargs,
        kwargs.get("generation_config"),
        getattr(model, "generation_config", None),
    ):
        value = source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
        if value is not None:
            return value
    return None


def is_data(value: Any) -> bool:
    """Returns whether an argument of ``generate`` has one entry per sample, and so is a part of the batch."""
    return hasattr(value, "untyped_storage") and value.ndim > 0
