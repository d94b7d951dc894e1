"""What TRL's Trainers need: the figures that their losses note (rewards, accuracies, entropies), weighed by what they are means
of; and a refusal of losses that depend on which samples share a batch. Nothing of TRL is imported."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from dynagroup.errors import ConfigError
from dynagroup.update.loss_weight import count_label_tokens

__all__ = ["COUPLED", "LossFigures", "refuse_coupled"]

COUPLED = {
    "KTOTrainer": "its loss compares the samples of a batch with each other; keep TRL's own batches",
    "GRPOTrainer": "it generates its samples by group; divide them with shard_micro_batches",
    "RLOOTrainer": "it generates its samples by group; divide them with shard_micro_batches",
    "DistillationTrainer": "it makes its batches from what the teacher says; keep TRL's own",
}
"""Trainers of TRL whose losses need the batches that TRL makes."""
NOTING = {"SFTTrainer", "DPOTrainer", "RewardTrainer"}
"""TRL's Trainers whose losses gather for their figures only, and note them in ``_metrics``."""
OF_LABELS = {"entropy", "mean_token_accuracy"}
OF_CHOSEN = {"mean_token_accuracy", "logits/chosen"}
OF_REJECTED = {"logits/rejected"}


def _classes(trainer: Any) -> list[str]:
    return [c.__name__ for c in type(trainer).__mro__ if c.__module__.startswith("trl.")]


def refuse_coupled(trainer: Any) -> None:
    """Losses that depend on which samples share a batch.

    Raises:
        ConfigError: names the Trainer or the loss.
    """
    classes = _classes(trainer)
    for name in classes:
        if name in COUPLED:
            raise ConfigError(f"TRL's {name} does not go with dynagroup: {COUPLED[name]}")
    sorting = sorted({"aot", "aot_unpaired"} & set(getattr(trainer, "loss_types", ())))
    if "DPOTrainer" in classes and sorting:
        raise ConfigError(
            f"DPO with loss_type={sorting[0]!r} sorts the pairs of a batch against each other, so it depends on which share "
            "one; choose a loss of single pairs, e.g. 'sigmoid'"
        )


# What: TRL notes one figure a batch, a mean over the samples or tokens of all ranks' batches, and logs the mean of these means;
#   it gathers tensors of one shape. Batches of ours differ in size, over ranks as well. So while a loss is computed, gathering
#   gives this rank's own values; each figure is then a mean over this rank's batch, and is kept with the count it is a mean of.
#   Once an update the sums of count * figure and of counts are added up over ranks; what TRL finds to log is their quotient.
# Why right: a mean over a union is the mean of the means weighed by their counts. A rank that idles has none.
# Cost: one small exchange an update, in place of TRL's eight or so a batch.
class LossFigures:
    """Of one Trainer. It does nothing where the Trainer is not one of :data:`NOTING`."""

    def __init__(self, trainer: Any) -> None:
        notes = NOTING & {*_classes(trainer)} and hasattr(trainer, "_metrics")
        self.trainer = trainer if notes else None
        self._new: dict[str, tuple[float, float]] = {}
        """Of this rank's batches since figures were added up: (weight * figure, weight)."""
        self._sums: dict[tuple[str, str], tuple[float, float]] = {}
        self._tokens = 0.0

    @contextlib.contextmanager
    def of_batch(self, mode: str, batch: Any, *, counts: bool) -> Iterator[None]:
        """Around the loss of a batch. ``counts``: False for one that only keeps ranks in step."""
        if self.trainer is None:
            yield
            return
        noted, tokens = self.trainer._metrics[mode], self.trainer._total_train_tokens
        before = {key: len(values) for key, values in noted.items()}
        with _gathering_locally(self.trainer.accelerator):
            yield
        weights = _weights(batch)
        for key in noted.keys() - {"num_tokens"}:
            for value in noted[key][before.get(key, 0) :] if counts else ():
                self._new[key] = _sum(self._new.get(key), (weights[key] * value, weights[key]))
            del noted[key][before.get(key, 0) :]
        self._tokens += (self.trainer._total_train_tokens - tokens) * counts
        self.trainer._total_train_tokens = tokens

    def add_up(self, mode: str) -> None:
        """Over all ranks, which all call it. TRL clears its lists when it has logged them: then a new mean begins."""
        if self.trainer is None:
            return
        from accelerate.utils import gather_object

        noted = self.trainer._metrics[mode]
        gathered = gather_object([(self._new, self._tokens)])
        for key in sorted({key for new, _ in gathered for key in new}):
            kept = self._sums.get((mode, key)) if noted[key] else None
            for new, _ in gathered:
                kept = _sum(kept, new.get(key, (0.0, 0.0)))
            value, weight = self._sums[mode, key] = kept or (0.0, 0.0)
            noted[key] = [value / weight if weight else 0.0]
        self.trainer._total_train_tokens += sum(tokens for _, tokens in gathered)
        noted["num_tokens"] = [self.trainer._total_train_tokens]
        self._new, self._tokens = {}, 0.0


def _sum(one: tuple[float, float] | None, other: tuple[float, float]) -> tuple[float, float]:
    return other if one is None else (one[0] + other[0], one[1] + other[1])


def _weights(batch: Mapping[str, Any]) -> Mapping[str, float]:
    """What each figure of a batch is a mean of: tokens for some keys, else samples."""
    weights: dict[str, float] = defaultdict(lambda: float(len(batch["input_ids"])))
    mask = batch.get("completion_mask")
    if "labels" in batch:
        weights.update(dict.fromkeys(OF_LABELS, float(count_label_tokens(batch))))
    elif mask is not None:
        chosen, rejected = (float(half[:, 1:].sum()) for half in mask.chunk(2))
        weights["entropy"] = chosen + rejected
        weights.update(dict.fromkeys(OF_CHOSEN, chosen) | dict.fromkeys(OF_REJECTED, rejected))
    return weights


@contextlib.contextmanager
def _gathering_locally(accelerator: Any) -> Iterator[None]:
    accelerator.gather = accelerator.gather_for_metrics = lambda tensor, *args, **kwargs: tensor
    try:
        yield
    finally:
        del accelerator.gather, accelerator.gather_for_metrics
