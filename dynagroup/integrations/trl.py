"""Figures that TRL's trainers log while they compute a loss (rewards, accuracies of tokens), for batches of unequal sizes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from accelerate.utils import gather_object

from dynagroup.errors import ConfigError
from dynagroup.update.loss_weight import count_label_tokens


@dataclass
class FigureMeans:
    """The weighed mean of each figure since TRL logged it last, by mode ("train", "eval") and name."""

    sums: dict[tuple[str, str], float] = field(default_factory=dict)
    weights: dict[tuple[str, str], float] = field(default_factory=dict)

    def add(self, figure: tuple[str, str], value: float, weight: float, *, is_first: bool) -> float:
        """Adds one batch's value; returns the mean of all batches."""
        if is_first:
            self.sums[figure] = 0.0
            self.weights[figure] = 0.0
        self.sums[figure] += value * weight
        self.weights[figure] += weight
        return self.sums[figure] / max(self.weights[figure], 1.0)


class TrlTrainer(Protocol):
    """What is used of a Trainer, of TRL or not."""

    accelerator: Any
    figure_means: FigureMeans


# TRL gathers figures of all ranks' batches as tensors of one shape, appends their mean to a list, and logs the list's mean.
# Batches that fit have different sizes. So here each rank gives as many numbers as it has, and each list has one number:
# the mean of all batches, weighed by their samples if TRL gathers one number a sample (DPO), else by their label tokens (SFT).
@contextmanager
def trl_figures(
    trainer: TrlTrainer, batch: object = None, *, idle: bool = False, probe: bool = False
) -> Iterator[None]:
    """Context manager for computing the loss of a batch. ``idle``: this rank's batch does not count. ``probe``: nothing is
    logged, and nothing exchanged."""
    settings = vars(trainer)
    figures = settings.get("_metrics", settings.get("_stored_metrics"))
    if figures is None:
        yield
        return
    before = _num_values(figures)
    num_tokens = settings.get("_total_train_tokens")
    gather = _Gather(idle=idle, alone=probe)
    accelerator = trainer.accelerator
    accelerator.gather = gather
    accelerator.gather_for_metrics = gather
    try:
        yield
    finally:
        del accelerator.gather, accelerator.gather_for_metrics
        if probe and num_tokens is not None:
            settings["_total_train_tokens"] = num_tokens
    weight = 0.0
    if not probe:
        weight = gather.num_samples or _label_tokens(batch, idle=idle)
    for figure in _num_values(figures):
        mode, name = figure
        values = figures[mode][name]
        num_before = before.get(figure, 0)
        new = values[num_before:]
        del values[num_before:]
        if new and not probe:
            is_first = num_before == 0  # the earlier ones were logged
            mean = trainer.figure_means.add(figure, new[-1], weight, is_first=is_first)
            values[:] = [mean]
        if not values:
            del figures[mode][name]


def _num_values(figures: Mapping[str, Mapping[str, list[float]]]) -> dict[tuple[str, str], int]:
    """Returns the length of each figure's list, by mode and name."""
    sizes = {}
    for mode, of_mode in figures.items():
        for name, values in of_mode.items():
            sizes[mode, name] = len(values)
    return sizes


@dataclass(kw_only=True)
class _Gather:
    """Stands for ``accelerator.gather``: ranks may give different numbers of values."""

    idle: bool
    alone: bool
    num_samples: int = 0  # of all ranks, if TRL gathers one number a sample

    def __call__(self, tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        own = [] if self.idle else tensor.flatten().tolist()
        values = own if self.alone else gather_object(own)
        if tensor.ndim > 0:
            self.num_samples = max(self.num_samples, len(values))
        return tensor.new_tensor(values)


def _label_tokens(batch: object, *, idle: bool) -> float:
    """Returns the label tokens of all ranks' batches, without each sample's first; 1 if batches have no labels."""
    try:
        num_tokens = 0.0 if idle else float(count_label_tokens(batch, shifted=True))
    except ConfigError:
        num_tokens = 1.0
    return sum(gather_object([num_tokens]))
