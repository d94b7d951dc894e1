"""Evaluates and predicts with batches that fit: planned once, with equally many samples on every rank, results in
dataset order, and a loss that does not depend on the batches."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from accelerate.utils import gather_object, recursively_apply
from torch.utils.data import DataLoader, SequentialSampler
from transformers import EvalPrediction
from transformers.trainer_pt_utils import LengthGroupedSampler

from dynagroup.budget.base import Budget
from dynagroup.errors import ConfigError
from dynagroup.integrations.hf_data import (
    host_order,
    loader_kwargs,
    sample_kinds,
    sample_lengths,
    work_of,
)
from dynagroup.integrations.hf_step import TrainerSteps, trl_figures
from dynagroup.lengths import Kinds
from dynagroup.online.datasets import is_stream
from dynagroup.plan.cost import DEFAULT_WORK, Work
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.shapes import BatchShape, IntArray, primary
from dynagroup.update.filling import LABELS, FillingCollator
from dynagroup.update.loss_weight import count_label_tokens, weigher
from dynagroup.update.split_test import pieces_of
from dynagroup.validation import warn_user


# Forms rows of W batches, one per rank. Batches of a row have equally many samples, because the Trainer gathers results
# of one shape; and one kind. The samples of each kind are sorted by length and grouped by W. Groups are cut into
# batches as if each were one sample, as long as its longest; each rank takes its own sample of each group, so its batch
# fits. Up to W - 1 samples of a kind remain, the shortest ones, and become a row of their own.
class EvaluationRows:
    """A batch sampler for accelerate, which runs batch ``k`` on rank ``k % num_ranks``. ``kinds``: labels of samples.

    >>> from dynagroup import TokenBudget
    >>> rows = EvaluationRows({"tokens": np.array([3, 9, 2, 8, 1])}, TokenBudget(18), num_ranks=2)
    >>> list(rows), rows.order.tolist()
    ([[1, 0], [3, 2], [4], [4]], [1, 0, 3, 2, 4])
    """

    def __init__(
        self,
        lengths: Mapping[str, Any],
        budget: Budget,
        num_ranks: int,
        work: Work = DEFAULT_WORK,
        kinds: Any = None,
    ) -> None:
        of = Kinds.read(kinds, len(lengths[primary(lengths)])).codes
        order = np.lexsort([-lengths[primary(lengths)], of])
        of_kind = np.split(order, np.flatnonzero(np.diff(of[order])) + 1)
        ends = [len(own) - len(own) % num_ranks for own in of_kind]
        groups = np.concatenate(
            [own[:end] for own, end in zip(of_kind, ends, strict=True)]
        ).reshape(-1, num_ranks)
        of_groups = {
            name: values[groups].max(axis=1).astype(np.int32) for name, values in lengths.items()
        }
        sampler = LengthAwareBatchSampler(
            of_groups, budget, work=work, kinds=of[groups[:, 0]], rank=0, world_size=1
        )
        left = [own[end:] for own, end in zip(of_kind, ends, strict=True) if end < len(own)]
        self.num_ranks, self.ladder, self.packed = (
            num_ranks,
            budget.ladder,
            budget.layout == "packed",
        )
        # For each row: dataset indices (samples of a rank, ranks); and how many ranks have samples of their own.
        self.rows: list[IntArray] = [groups[batch] for batch in sampler]
        self.num_real = [num_ranks] * len(self.rows) + [*map(len, left)]
        self.rows += [np.resize(few, (1, num_ranks)) for few in left]
        dealt = [
            row.T[:real].reshape(-1) for row, real in zip(self.rows, self.num_real, strict=True)
        ]
        self.order: IntArray = np.concatenate(
            [order[:0], *dealt]
        )  # dataset index of each result, as gathered
        self.shapes: list[
            tuple[int, ...]
        ] = []  # per row, the shape to which batches are padded; empty: none
        if self.ladder is not None:
            longest = {
                name: [values[row].max() for row in self.rows] for name, values in lengths.items()
            }
            run = self.ladder.as_run(BatchShape.of([*map(len, self.rows)], longest))
            self.shapes = list(
                zip(
                    run.num_samples,
                    *(run.longest[name] for name in self.ladder.streams),
                    strict=True,
                )
            )

    def __len__(self) -> int:
        return len(self.rows) * self.num_ranks

    def __iter__(self) -> Iterator[list[int]]:
        for row in self.rows:
            yield from row.T.tolist()


IN_ORDER = (SequentialSampler, LengthGroupedSampler)  # the Trainer's own samplers for evaluation


class _Pass:
    """One evaluation of a dataset, over all its batches."""

    def __init__(self, rows: EvaluationRows, accelerator: Any) -> None:
        self.rows, self.accelerator = rows, accelerator
        self.row = -1
        self.losses: list[
            tuple[float, float]
        ] = []  # (mean loss, weight) of each of this rank's batches

    def gather(self, tensors: Any) -> Any:
        """Returns tensors gathered from all ranks, without rows of repeated samples (of which each rank has one)."""
        found, real = self.accelerator.gather(tensors), self.rows.num_real[self.row]
        if real == self.rows.num_ranks:
            return found
        return _mapped(
            lambda values: (
                values[: len(values) * real // self.rows.num_ranks] if values.ndim else values
            ),
            found,
        )

    def mean_loss(self) -> float | None:
        """Returns the mean loss over all ranks; None: no batch has a loss."""
        found = [(loss, weight) for loss, weight in gather_object(self.losses) if weight > 0]
        return (
            math.fsum(loss * weight for loss, weight in found) / math.fsum(w for _, w in found)
            if found
            else None
        )

    def in_order(self, found: Any) -> Any:
        """Returns gathered results of all samples in dataset order; several rows a sample, in the order of the plan."""
        places = np.argsort(self.rows.order)
        sizes: list[int] = []
        _mapped(lambda values: sizes.append(len(values) if values.ndim else 0), found)
        if max(sizes, default=0) > len(places) and not self.rows.packed:
            way_out = "dynagroup_eval=False evaluates in the dataset's order"
            warn_user(
                f"predictions with several rows a sample stay in the order of the plan; {way_out}"
            )
        return _mapped(
            lambda values: values[places] if values.ndim and len(values) == len(places) else values,
            found,
        )


def _mapped(fn: Callable[[Any], Any], values: Any) -> Any:
    return recursively_apply(fn, values, test_type=lambda value: hasattr(value, "ndim"))


class Evaluator(TrainerSteps):
    """The part of :class:`~dynagroup.integrations.hf.DynagroupTrainerMixin` that evaluates and predicts."""

    dynagroup_eval: Budget | bool
    _evaluation: _Pass | None = None
    _planned_rows: dict[tuple[int, int, str, float | None], tuple[Any, EvaluationRows | None]]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        own: Any = self.eval_dataset
        dataset = (
            own
            if eval_dataset is None
            else own[eval_dataset]
            if isinstance(eval_dataset, str)
            else eval_dataset
        )
        return self._fitted(super().get_eval_dataloader(eval_dataset), dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return self._fitted(super().get_test_dataloader(test_dataset), test_dataset)

    def _fitted(self, host: Any, dataset: Any) -> Any:
        """Returns a loader of batches that fit (without lengths, the Trainer's own loader); planned once per dataset."""
        if self.dynagroup_eval is False or is_stream(dataset) or not len(dataset):
            return host
        # Metrics that get losses need the Trainer's own batches, because it repeats a batch's loss for each sample.
        odd = (
            not self.args.eval_do_concat_batches
            or self.args.eval_use_gather_object
            or "loss" in self.args.include_for_metrics
        )
        if odd or self.get_tp_size() * self.get_cp_size() * self.get_sp_size() > 1:
            warn_user(
                "evaluation uses the Trainer's own batches, which include_for_metrics=['loss'], "
                "eval_do_concat_batches=False, eval_use_gather_object or samples shared by ranks "
                "need; dynagroup_eval=False: no warning"
            )
            return host
        budget = (
            (self.update_loader or self.dynagroup).budget
            if self.dynagroup_eval is True
            else self.dynagroup_eval
        )
        generates = getattr(self.args, "predict_with_generate", False)
        if budget.ladder is not None and (generates or budget.layout == "packed"):
            budget = budget.ladder.base  # generated and packed batches are not padded to few shapes
        key = (id(dataset), len(dataset), budget.fingerprint, budget.applied)
        if key not in self._planned_rows:
            rows: Any = None
            try:
                if len(host.dataset) != len(dataset) or type(host_order(host)) not in IN_ORDER:
                    raise ConfigError(
                        "the Trainer class chooses other samples or another order: choose them in eval_dataset"
                    )
                lengths = sample_lengths(self, dataset, name="eval_dataset")
                labels = self._labels(dataset, host.dataset)
                rows = EvaluationRows(
                    lengths, budget, self.accelerator.num_processes, work_of(self), labels
                )
            except ConfigError as error:
                size = f"per_device_eval_batch_size={self.args.per_device_eval_batch_size}"
                warn_user(
                    f"evaluation runs batches of {size} samples, because {error}; dynagroup_eval=False: no warning"
                )
            self._planned_rows[key] = dataset, rows
        rows = self._planned_rows[key][1]
        if rows is None:
            return host
        kept = {
            name: value
            for name, value in loader_kwargs(host).items()
            if name != "persistent_workers"
        }
        return self.accelerator.prepare(DataLoader(host.dataset, batch_sampler=rows, **kept))

    def _labels(self, dataset: Any, processed: Any) -> Any:
        """Returns each sample's label; None (kinds may mix) if labels are known only for the training samples."""
        config, own = self.dynagroup, dataset is self.train_dataset
        if config.kind_of is not None:
            return [config.kind_of(sample) for sample in processed]
        if config.kinds is None or isinstance(config.kinds, str) or own:
            return sample_kinds(dataset, config.kinds, name="eval_dataset")
        if self.accelerator.num_processes > 1 and config.one_kind == "step":
            warn_user(
                "evaluation mixes kinds, because `kinds` labels only training samples; name a column instead"
            )
        return None

    def evaluation_loop(self, dataloader: Any, description: str, *args: Any, **kwargs: Any) -> Any:
        rows: Any = getattr(dataloader, "batch_sampler", None)
        while hasattr(rows, "batch_sampler"):  # accelerate wraps the sampler on several ranks
            rows = rows.batch_sampler
        if not isinstance(rows, EvaluationRows):
            return super().evaluation_loop(dataloader, description, *args, **kwargs)
        compute, before = self.compute_metrics, self.args.average_tokens_across_devices
        self._find_evaluation_rule(rows, dataloader.dataset)
        run = self._evaluation = _Pass(rows, self.accelerator)
        self.gather_function, self.args.average_tokens_across_devices = run.gather, False
        if compute is not None and not self.args.batch_eval_metrics:
            parts = lambda found: (found.predictions, found.label_ids, found.inputs)  # noqa: E731
            self.compute_metrics = lambda found: compute(
                EvalPrediction(*map(run.in_order, parts(found)))
            )
        try:
            output = super().evaluation_loop(dataloader, description, *args, **kwargs)
        finally:
            self._evaluation, self.gather_function = None, self.accelerator.gather_for_metrics
            self.compute_metrics, self.args.average_tokens_across_devices = compute, before
        name = f"{kwargs.get('metric_key_prefix', args[2] if len(args) > 2 else 'eval')}_loss"
        metrics: Any = output.metrics
        if name in metrics and (loss := run.mean_loss()) is not None:
            metrics[name] = loss
        if rows.packed and output.predictions is not None:
            way_out = "for one row a sample, give `dynagroup_eval` a padded budget and a collator that pads"
            warn_user(
                f"predictions of packed batches are one row a batch, in the order of the plan; {way_out}"
            )
        return output._replace(
            predictions=run.in_order(output.predictions), label_ids=run.in_order(output.label_ids)
        )

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        self._items: Any = super()._get_num_items_in_batch(batch_samples, device)
        return self._items

    def _weight_of(self, inputs: Any, num_samples: int) -> float:
        """Returns the weight of an evaluated batch whose loss is a mean."""
        rule = self.dynagroup.weigh if self._rule is None else self._rule
        if rule in ("auto", "sum") or isinstance(rule, Mapping):
            with suppress(ConfigError):  # without labels, samples count
                return float(count_label_tokens(inputs, shifted=self._loss_shifts_labels))
            return float(num_samples)
        return weigher(rule)(inputs, num_samples)

    def _find_evaluation_rule(self, rows: EvaluationRows, samples: Any) -> None:
        """Tests how losses of one's own add up, if no training has done so. Warns if they do not."""
        model: Any = self.model
        trained = any(parameter.requires_grad for parameter in model.parameters())
        if self._rule is not None or not self._has_own_loss or not trained:
            return
        largest = max(rows.rows, key=len)[:, 0].tolist()
        pieces = pieces_of(samples.__getitem__, largest, self.data_collator)
        try:
            self._rule = self._tested(self.model, pieces)
        except ConfigError as error:
            warn_user(f"the loss of an evaluation depends on its batches, because {error}")

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        run = self._evaluation
        if run is None:
            return super().prediction_step(model, inputs, *args, **kwargs)
        run.row += 1
        repeats, count = (
            self.accelerator.process_index >= run.rows.num_real[run.row],
            len(run.rows.rows[run.row]),
        )
        own = self._has_own_loss
        items: Any = self._get_num_items_in_batch([inputs], self.args.device)
        is_sum = items is not None and self._rule in ("sum", None)
        # A loss of one's own may be divided by the items of all ranks; other losses are of a rank's batch alone.
        self.args.average_tokens_across_devices, self._items, filled = (
            own and is_sum,
            None,
            inputs,
        )
        if (
            run.rows.shapes
            and (self._rule is not None or not own)
            and {*self.label_names} & {*inputs} <= LABELS
        ):
            filled = FillingCollator(None, run.rows.ladder, self._pad).fill(
                inputs, count, run.rows.shapes[run.row]
            )
        with trl_figures(self, idle=repeats):
            found = super().prediction_step(model, filled, *args, **kwargs)
        self.args.average_tokens_across_devices = False
        told = is_sum and self._items is not None
        weight = float(items or 0) if is_sum else self._weight_of(inputs, count)
        scale = (
            float(self._items or 0) / max(weight, 1.0) / self.accelerator.num_processes
            if told and own
            else 1.0
        )
        if found[0] is not None:
            run.losses.append((float(found[0]) * scale, 0.0 if repeats else weight))
        made = next(iter(getattr(found[1], "shape", ())), 0)
        if made > count and getattr(self.args, "predict_with_generate", False):
            raise ConfigError(
                f"generate() made {made} texts for {count} samples; set dynagroup_eval=False"
            )
        if filled is inputs:
            return found
        return found[0], *(
            _mapped(lambda values: values[:count] if values.ndim else values, one)
            for one in found[1:]
        )
