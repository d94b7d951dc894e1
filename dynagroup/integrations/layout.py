"""Chooses the layout of a Trainer's batches: packed where that changes no result and needs no mask, else padded."""

import math
from collections.abc import Sequence

import numpy as np

from dynagroup.budget.tokens import TokenBudget
from dynagroup.errors import ConfigError
from dynagroup.integrations.config import HostTrainer
from dynagroup.integrations.packing import (
    Collate,
    SampleBySample,
    needs_no_mask,
    packing_collator,
)
from dynagroup.integrations.probe import Model, rounding_of, run
from dynagroup.integrations.varlen import attention_of
from dynagroup.shapes import Streams
from dynagroup.validation import explained


def packed_instead(
    trainer: HostTrainer,
    dataset: Sequence[object],
    lengths: Streams,
    collate_fn: Collate,
) -> Collate | None:
    """Returns a collate function that packs what ``collate_fn`` makes of each sample; None: batches stay padded. All
    ranks must call it, and get the same. Notes the reason in ``trainer.layout_line``."""
    config = trainer.dynagroup
    trainer.layout_line = None
    if config.layout == "padded" or config.budget.layout == "packed":
        return None
    packed = None
    reason = reason_for_padding(trainer, lengths)
    if reason is None:
        packed, reason = _tested(trainer, dataset, lengths, collate_fn)
    (is_refused,) = trainer.data_world.all_max([int(packed is None)])
    if is_refused:
        reason = reason or "packed samples gave other results on another rank"
        trainer.layout_line = f"layout: padded, because {reason}"
        return None
    trainer.layout_line = (
        f"layout: packed, because attention {attention_of(trainer.model)!r} needs no mask, and packed samples gave "
        "the results of each alone"
    )
    return packed


def reason_for_padding(trainer: HostTrainer, lengths: Streams) -> str | None:
    """Returns why batches must stay padded, as far as settings tell; None: the model is to be tested."""
    config = trainer.dynagroup
    if not hasattr(trainer.model, "config"):
        return "the model is not of transformers"
    if not needs_no_mask(trainer.model):
        attention = attention_of(trainer.model)
        return f"attention {attention!r} needs a mask for packed samples, which costs more than padding"
    if not isinstance(config.budget, TokenBudget):
        return "only a TokenBudget can be packed unasked"
    if config.mode == "online" or config.shapes is not None or config.out_of_memory is not None:
        return "mode='online', `shapes` and `out_of_memory` need padded batches unless asked"
    if trainer.has_own_loss:
        return "a loss of your own may read the padding"
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return "the model is sharded, so packed samples cannot be tested"
    if len(lengths) > 1 or min(values.min(initial=1) for values in lengths.values()) < 1:
        return "samples have several lengths, or no tokens"
    return None


def _tested(
    trainer: HostTrainer,
    dataset: Sequence[object],
    lengths: Streams,
    collate_fn: Collate,
) -> tuple[Collate | None, str | None]:
    """Returns the collate function that packs, or why results would change."""
    (tokens,) = lengths.values()
    samples = [dataset[int(np.argmin(tokens))], dataset[int(np.argmax(tokens))]]
    try:
        with trainer.accelerator.autocast():
            packed = SampleBySample(collate_fn, packing_collator(trainer.model))
            check_losses_equal(trainer.model, collate_fn, packed, samples)
    except ConfigError as error:
        return None, str(error).partition(";")[0]
    return packed, None


def check_losses_equal(
    model: Model, collate_fn: Collate, packed: Collate, samples: Sequence[object]
) -> None:
    """Checks that a sample packed with itself has the mean loss that it has alone. Raises ConfigError: it has not, or the
    model has no loss. So no label is lost or added, and no token is predicted from another sample."""
    for sample in samples:
        with explained("the samples cannot be packed"):
            alone = run(model, collate_fn([sample])).loss
            twice = run(model, packed([sample, sample])).loss
            difference = abs(float(twice) - float(alone))
            limit = rounding_of(model, alone) * abs(float(alone))
        if not difference <= limit and not math.isnan(float(alone)):
            raise ConfigError(
                f"the loss of a packed sample differs from that alone by {difference:.2g}"
            )
