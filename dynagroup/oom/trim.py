"""Which padding a part of a batch may lose without losing anything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dynagroup.oom.fields import is_array, to_numpy

__all__ = ["labels_allow", "trim_targets"]

_IGNORED_LABEL = -100


def trim_targets(parts: dict[str, Any], batch: Mapping[str, Any]) -> None:
    """A sequence-to-sequence batch's other side: right padding shown by its own mask, or by ignored labels."""
    mask, labels = parts.get("decoder_attention_mask"), parts.get("labels")
    source = parts.get("attention_mask")
    if is_array(mask) and mask.ndim == 2:
        used = (mask != 0).any(0)
    elif is_array(labels) and labels.ndim == 2 and is_array(source) and _widths_differ(batch):
        used = (labels != _IGNORED_LABEL).any(0)
    else:
        return
    columns = np.flatnonzero(to_numpy(used))
    last = int(columns[-1]) + 1 if len(columns) else 1
    width = len(used)
    for key in ("labels", "decoder_input_ids", "decoder_attention_mask"):
        value = parts.get(key)
        if not is_array(value) or value.ndim < 2 or value.shape[1] != width:
            continue
        if key != "labels" or bool((value[:, last:] == _IGNORED_LABEL).all()):
            parts[key] = value[:, :last]


def _widths_differ(batch: Mapping[str, Any]) -> bool:
    return batch["labels"].shape[1] != batch["attention_mask"].shape[1]


def labels_allow(batch: Mapping[str, Any], start: int, stop: int, first: int, last: int) -> bool:
    """Whether no label is lost. Labels as wide as the mask may also be a target side of the same width by accident."""
    labels, width = batch.get("labels"), batch["attention_mask"].shape[1]
    if not is_array(labels) or labels.ndim != 2 or labels.shape[1] != width or "decoder_input_ids" in batch:
        return True
    rows = labels[start:stop]
    return all(bool((side == _IGNORED_LABEL).all()) for side in (rows[:, :first], rows[:, last:]))
