"""The figures that TRL's losses note of every batch (rewards, accuracies, entropies), weighed by what they are means of."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dynagroup.update.loss_weight import count_label_tokens

__all__ = ["LossFigures"]

NOTING = {"SFTTrainer", "DPOTrainer", "RewardTrainer"}
"""TRL's Trainers whose losses gather for their figures only, and note them in ``_metrics``."""
OF_LABELS = {"entropy", "mean_token_accuracy"}
OF_CHOSEN = {"mean_token_accuracy", "logits/chosen"}
OF_REJECTED = {"logits/rejected"}


# What: TRL notes one figure a batch, a mean over the samples or tokens of all ranks' batches, and logs the mean of these means;
#   it gathers tensors of one shape. Batches of ours differ in size, over ranks as well. So while a loss is computed, gathering
#   gives this rank's own values; each figure is then a mean over this rank's batch, and is kept with the count it is a mean of.
#   Once an update the sums of count * figure and of counts are added up over ranks; what TRL finds to log is their quotient.
# Why right: a mean over a union is the mean of the means weighed by their counts. A rank that idles has none.
# Cost: one small exchange an update, in place of TRL's eight or so a batch.
class LossFigures:
    """Of one Trainer. It does nothing where the Trainer is not one of :data:`NOTING`."""

    def __init__(self, trainer: Any) -> None:
        classes = {c.__name__ for c in type(trainer).__mro__ if c.__module__.startswith("trl.")}
        self.trainer = trainer if classes & NOTING and hasattr(trainer, "_metrics") else None
        self._new: dict[str, list[float]] = {}
        self._sums: dict[tuple[str, str], list[float]] = {}
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
        for key in [key for key in noted if key != "num_tokens"]:
            for value in noted[key][before.get(key, 0) :] if counts else ():
                total = self._new.setdefault(key, [0.0, 0.0])
                weight = weights[key]
                total[0], total[1] = total[0] + weight * value, total[1] + weight
            del noted[key][before.get(key, 0) :]
        self._tokens += (self.trainer._total_train_tokens - tokens) * counts
        self.trainer._total_train_tokens = tokens

    def add_up(self, mode: str) -> None:
        """Over all ranks, which all call it. TRL clears its lists when it has logged them: then a new mean begins."""
        if self.trainer is None:
            return
        from accelerate.utils import gather_object

        noted = self.trainer._metrics[mode]
        totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        gathered = gather_object([(self._new, self._tokens)])
        for new, _ in gathered:
            for key, (value, weight) in new.items():
                totals[key] = [totals[key][0] + value, totals[key][1] + weight]
        for key, (value, weight) in totals.items():
            before = self._sums.get((mode, key), [0.0, 0.0]) if noted[key] else [0.0, 0.0]
            value, weight = self._sums[mode, key] = [before[0] + value, before[1] + weight]
            noted[key] = [value / weight if weight else 0.0]
        self.trainer._total_train_tokens += sum(tokens for _, tokens in gathered)
        noted["num_tokens"] = [self.trainer._total_train_tokens]
        self._new, self._tokens = {}, 0.0


def _weights(batch: Mapping[str, Any]) -> Mapping[str, float]:
    """What each figure of a batch is a mean of: tokens for some keys, else samples."""
    weights: dict[str, float] = defaultdict(lambda: float(len(batch["input_ids"])))
    mask = batch.get("completion_mask")
    if "labels" in batch:
        weights.update(dict.fromkeys(OF_LABELS, float(count_label_tokens(batch))))
    elif mask is not None:
        chosen, rejected = (float(half[:, 1:].sum()) for half in np.split(mask.cpu().numpy(), 2))
        weights["entropy"] = chosen + rejected
        weights.update(dict.fromkeys(OF_CHOSEN, chosen) | dict.fromkeys(OF_REJECTED, rejected))
    return weights


@contextlib.contextmanager
def _gathering_locally(accelerator: Any) -> Iterator[None]:
    accelerator.gather = accelerator.gather_for_metrics = _own
    try:
        yield
    finally:
        del accelerator.gather, accelerator.gather_for_metrics


def _own(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return tensor
