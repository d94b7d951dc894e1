"""Evaluates and predicts with batches that fit: planned once, with equally many samples on every rank, results in
dataset order, and a loss that does not depend on the batches."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, recursively_apply
from numpy.typing import NDArray
from torch.utils.data import DataLoader, SequentialSampler
from transformers import EvalPrediction
from transformers.trainer_pt_utils import LengthGroupedSampler

from dynagroup.budget.base import Budget
from dynagroup.errors import ConfigError
from dynagroup.integrations.hf_data import (
    host_order,
    innermost,
    sample_kinds,
    sample_lengths,
    work_of,
)
from dynagroup.integrations.hf_step import Batch, Items, Model, TrainerSteps
from dynagroup.integrations.trl import trl_figures
from dynagroup.lengths import Kinds
from dynagroup.online.datasets import is_stream
from dynagroup.plan.cost import DEFAULT_WORK, Work
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.shapes import BatchShape, IntArray, primary
from dynagroup.update.filling import LABELS, FillingCollator
from dynagroup.update.loss_check import pieces_of
from dynagroup.update.loss_weight import count_label_tokens, weigher
from dynagroup.validation import warn_user

IN_ORDER = (SequentialSampler, LengthGroupedSampler)  # the Trainer's own samplers for evaluation
Results: TypeAlias = Any  # arrays or tensors, perhaps nested in tuples, lists and dicts
Dataset: TypeAlias = Any
Loader: TypeAlias = DataLoader[Any]
Codes: TypeAlias = NDArray[np.int32]  # of kinds, one for each sample


@dataclass(frozen=True, kw_only=True)
class Row:
    """One batch on every rank; all with equally many samples."""

    samples: IntArray  # dataset indices, int64 (samples of a rank, ranks)
    num_real: int  # ranks whose samples are not repeated from another rank
    shape: tuple[int, int] | None  # to which its batches are padded; None: not padded further


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
        lengths: Mapping[str, IntArray],
        budget: Budget,
        num_ranks: int,
        work: Work = DEFAULT_WORK,
        kinds: Sequence[Any] | None = None,
    ) -> None:
        self.lengths = lengths
        self.budget = budget
        self.num_ranks = num_ranks
        self.packed = budget.layout == "packed"
        codes = Kinds.read(kinds, len(lengths[primary(lengths)])).codes
        groups, left_over = self._group(codes)
        self.rows: list[Row] = []
        for numbers in self._sampler(groups, codes, work):
            self._append(groups[numbers], num_ranks)
        for few in left_over:
            self._append(np.resize(few, (1, num_ranks)), len(few))
        gathered = [row.samples.T[: row.num_real].reshape(-1) for row in self.rows]
        no_samples = np.zeros(0, np.int64)
        self.order: IntArray = np.concatenate([no_samples, *gathered])  # of results, as gathered

    def _group(self, codes: Codes) -> tuple[IntArray, list[IntArray]]:
        """Sorts each kind by length and groups it by the number of ranks.

        Returns the groups, int64 (groups, ranks), and the remaining samples of each kind that has any.
        """
        order = np.lexsort([-self.lengths[primary(self.lengths)], codes])
        borders = np.flatnonzero(np.diff(codes[order])) + 1
        grouped = []
        left_over = []
        for samples in np.split(order, borders):
            num_left = len(samples) % self.num_ranks
            num_grouped = len(samples) - num_left
            grouped.append(samples[:num_grouped])
            if num_left:
                left_over.append(samples[num_grouped:])
        return np.concatenate(grouped).reshape(-1, self.num_ranks), left_over

    def _sampler(self, groups: IntArray, codes: Codes, work: Work) -> LengthAwareBatchSampler:
        """Returns a sampler over groups: each counts as one sample, as long as its longest."""
        longest = {}
        for name, values in self.lengths.items():
            longest[name] = values[groups].max(axis=1).astype(np.int32)
        kinds = codes[groups[:, 0]]
        return LengthAwareBatchSampler(
            longest, self.budget, work=work, kinds=kinds, rank=0, world_size=1
        )

    def _append(self, samples: IntArray, num_real: int) -> None:
        self.rows.append(Row(samples=samples, num_real=num_real, shape=self._shape(samples)))

    def _shape(self, samples: IntArray) -> tuple[int, int] | None:
        ladder = self.budget.ladder
        if ladder is None:
            return None
        longest = int(self.lengths[ladder.stream][samples].max())
        padded = ladder.as_run(BatchShape.of(len(samples), {ladder.stream: longest}))
        return (int(padded.num_samples[0]), int(padded.longest[ladder.stream][0]))

    def __len__(self) -> int:
        return len(self.rows) * self.num_ranks

    def __iter__(self) -> Iterator[list[int]]:
        for row in self.rows:
            yield from row.samples.T.tolist()


@dataclass
class _Pass:
    """One evaluation of a dataset, over all its batches."""

    rows: EvaluationRows
    accelerator: Accelerator
    num_begun: int = 0  # rows
    # of this rank's batches: mean loss, weight
    losses: list[tuple[float, float]] = field(default_factory=list)

    @property
    def row(self) -> Row:
        """The row that runs."""
        return self.rows.rows[self.num_begun - 1]

    def gather(self, tensors: Results) -> Results:
        """Returns tensors gathered from all ranks, without rows of repeated samples (of which each rank has one)."""
        results = self.accelerator.gather(tensors)
        num_real = self.row.num_real
        if num_real == self.rows.num_ranks:
            return results
        return _mapped(
            lambda values: values[: len(values) * num_real // self.rows.num_ranks], results
        )

    def mean_loss(self) -> float | None:
        """Returns the mean loss over all ranks; None: no batch has a loss."""
        losses = []
        weights = []
        for loss, weight in gather_object(self.losses):
            if weight > 0:
                losses.append(loss * weight)
                weights.append(weight)
        return math.fsum(losses) / math.fsum(weights) if weights else None

    def in_order(self, results: Results) -> Results:
        """Returns gathered results of all samples in dataset order; several rows a sample, in the order of the plan."""
        places = np.argsort(self.rows.order)
        sizes: list[int] = []
        _mapped(lambda values: sizes.append(len(values)), results)
        if max(sizes, default=0) > len(places) and not self.rows.packed:
            warn_user(
                "predictions with several rows a sample stay in the order of the plan; "
                "dynagroup_eval=False evaluates in the dataset's order"
            )
        return _mapped(
            lambda values: values[places] if len(values) == len(places) else values, results
        )


def _mapped(fn: Callable[[Any], Any], results: Results) -> Results:
    """Applies a function to all arrays and tensors that have a row for each sample."""
    return recursively_apply(fn, results, test_type=_has_rows)


def _has_rows(values: object) -> bool:
    return isinstance(values, (np.ndarray, torch.Tensor)) and values.ndim > 0


class Evaluator(TrainerSteps):
    """The part of :class:`~dynagroup.integrations.hf.DynagroupTrainerMixin` that evaluates and predicts."""

    dynagroup_eval: Budget | bool
    _evaluation: _Pass | None = None
    _planned_rows: dict[tuple[int, int, str, float | None], tuple[Dataset, EvaluationRows | None]]

    def get_eval_dataloader(self, eval_dataset: Dataset = None) -> Loader:
        host = super().get_eval_dataloader(eval_dataset)
        dataset = eval_dataset
        if eval_dataset is None:
            dataset = self.eval_dataset
        elif isinstance(eval_dataset, str):
            named: Any = self.eval_dataset
            dataset = named[eval_dataset]
        return self._fitted(host, dataset)

    def get_test_dataloader(self, test_dataset: Dataset) -> Loader:
        return self._fitted(super().get_test_dataloader(test_dataset), test_dataset)

    def _fitted(self, host: Loader, dataset: Dataset) -> Loader:
        """Returns a loader of batches that fit (without lengths, the Trainer's own loader); planned once per dataset."""
        if self.dynagroup_eval is False or is_stream(dataset) or not len(dataset):
            return host
        if self._needs_own_batches():
            warn_user(
                "evaluation uses the Trainer's own batches, which include_for_metrics=['loss'], "
                "eval_do_concat_batches=False, eval_use_gather_object or samples shared by ranks "
                "need; dynagroup_eval=False: no warning"
            )
            return host
        budget = self._evaluation_budget()
        key = (id(dataset), len(dataset), budget.fingerprint, budget.applied)
        if key not in self._planned_rows:
            # with the dataset, whose id no other then gets
            self._planned_rows[key] = (dataset, self._planned(host, dataset, budget))
        _, rows = self._planned_rows[key]
        if rows is None:
            return host
        loader = DataLoader(
            host.dataset,
            batch_sampler=rows,
            collate_fn=host.collate_fn,
            num_workers=host.num_workers,
            pin_memory=host.pin_memory and torch.cuda.is_available(),
            prefetch_factor=host.prefetch_factor,
            multiprocessing_context=host.multiprocessing_context,
            worker_init_fn=host.worker_init_fn,
            timeout=host.timeout,
        )
        return self.accelerator.prepare(loader)

    def _needs_own_batches(self) -> bool:
        """Returns whether results are not gathered as tensors of equal shape. Metrics that get losses need the Trainer's own
        batches, because it repeats a batch's loss for each sample."""
        args = self.args
        num_sharing = self.get_tp_size() * self.get_cp_size() * self.get_sp_size()
        return (
            not args.eval_do_concat_batches
            or args.eval_use_gather_object
            or "loss" in args.include_for_metrics
            or num_sharing > 1
        )

    def _evaluation_budget(self) -> Budget:
        budget: Any = self.dynagroup_eval
        if budget is True:
            budget = self.dynagroup.budget
            loader = self.update_loader
            if loader is not None and not self.packs_unasked:
                budget = loader.budget
        generates = getattr(self.args, "predict_with_generate", False)
        if budget.ladder is not None and (generates or budget.layout == "packed"):
            return budget.ladder.base  # generated and packed batches are not padded to few shapes
        return budget

    def _planned(self, host: Loader, dataset: Dataset, budget: Budget) -> EvaluationRows | None:
        """Returns the planned rows of a dataset; None, with a warning: its batches cannot be planned."""
        processed: Any = host.dataset
        try:
            if len(processed) != len(dataset) or type(host_order(host)) not in IN_ORDER:
                raise ConfigError(
                    "the Trainer class chooses other samples or another order: choose them in eval_dataset"
                )
            return EvaluationRows(
                sample_lengths(self, dataset, name="eval_dataset"),
                budget,
                self.accelerator.num_processes,
                work_of(self),
                self._labels(dataset, processed),
            )
        except ConfigError as error:
            size = self.args.per_device_eval_batch_size
            warn_user(
                f"evaluation runs batches of per_device_eval_batch_size={size} samples, because {error}; "
                "dynagroup_eval=False: no warning"
            )
            return None

    def _labels(self, dataset: Dataset, processed: Dataset) -> Any:
        """Returns each sample's label; None (kinds may mix) if labels are known only for the training samples."""
        config = self.dynagroup
        if config.kind_of is not None:
            return [config.kind_of(sample) for sample in processed]
        is_for_all = config.kinds is None or isinstance(config.kinds, str)
        if is_for_all or dataset is self.train_dataset:
            return sample_kinds(dataset, config.kinds, name="eval_dataset")
        if self.accelerator.num_processes > 1 and config.one_kind == "step":
            warn_user(
                "evaluation mixes kinds, because `kinds` labels only training samples; name a column instead"
            )
        return None

    def evaluation_loop(
        self,
        dataloader: Loader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        rows = innermost(dataloader)
        arguments = (description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if not isinstance(rows, EvaluationRows):
            return super().evaluation_loop(dataloader, *arguments)
        self._find_evaluation_rule(rows, dataloader.dataset)
        run = _Pass(rows, self.accelerator)
        args = self.args
        compute = self.compute_metrics
        average = args.average_tokens_across_devices
        self._evaluation = run
        self.gather_function = run.gather
        args.average_tokens_across_devices = False
        if compute is not None and not args.batch_eval_metrics:
            self.compute_metrics = _in_order(compute, run)
        try:
            output = super().evaluation_loop(dataloader, *arguments)
        finally:
            self._evaluation = None
            self.gather_function = self.accelerator.gather_for_metrics
            self.compute_metrics = compute
            args.average_tokens_across_devices = average
        metrics: Any = output.metrics
        loss_name = f"{metric_key_prefix}_loss"
        loss = run.mean_loss() if loss_name in metrics else None
        if loss is not None:  # that of all labels, and not the mean of batches' losses
            metrics[loss_name] = loss
        if rows.packed and output.predictions is not None:
            warn_user(
                "predictions of packed batches are one row a batch, in the order of the plan; for one row a "
                "sample, give `dynagroup_eval` a padded budget and a collator that pads"
            )
        return output._replace(
            predictions=run.in_order(output.predictions), label_ids=run.in_order(output.label_ids)
        )

    def _get_num_items_in_batch(self, batch_samples: list[Batch], device: torch.device) -> Items:
        self._items: Items = super()._get_num_items_in_batch(batch_samples, device)
        return self._items

    def _weight_of(self, inputs: Batch, num_samples: int) -> float:
        """Returns the weight of an evaluated batch whose loss is a mean."""
        rule = self.dynagroup.weigh if self._rule is None else self._rule
        if not isinstance(rule, Mapping) and rule not in ("auto", "sum"):
            return weigher(rule)(inputs, num_samples)
        try:
            return float(count_label_tokens(inputs, shifted=self._loss_shifts_labels))
        except ConfigError:  # without labels, samples count
            return float(num_samples)

    def _find_evaluation_rule(self, rows: EvaluationRows, dataset: Dataset) -> None:
        """Tests how losses of one's own add up, if no training has done so. Warns if they do not."""
        model: Model = self.model
        trains = any(parameter.requires_grad for parameter in model.parameters())
        if self._rule is not None or not self.has_own_loss or not trains:
            return
        largest = max(rows.rows, key=lambda row: len(row.samples))
        samples = largest.samples[:, 0].tolist()
        pieces = pieces_of(dataset.__getitem__, samples, self.data_collator)
        try:
            self._rule = self._tested(model, pieces)
        except ConfigError as error:
            warn_user(f"the loss of an evaluation depends on its batches, because {error}")

    def prediction_step(
        self,
        model: Model,
        inputs: Batch,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        varies = self._evaluation is None or self._evaluation.rows.budget.ladder is None
        with self.attention_kernels(varies=varies):
            return self._predicted(model, inputs, prediction_loss_only, ignore_keys)

    def _predicted(
        self, model: Model, inputs: Batch, prediction_loss_only: bool, ignore_keys: Any
    ) -> Any:
        """Returns the loss, the outputs and the labels of a batch; notes its weight in the evaluation's loss."""
        run = self._evaluation
        if run is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        run.num_begun += 1
        num_samples = len(run.row.samples)
        repeats = self.accelerator.process_index >= run.row.num_real
        is_own = self.has_own_loss
        items = self._get_num_items_in_batch([inputs], self.args.device)
        is_sum = items is not None and self._rule in ("sum", None)
        filled = self._filled(inputs, run)
        # A loss of one's own may be divided by the items of all ranks; other losses are of a rank's batch alone.
        self.args.average_tokens_across_devices = is_own and is_sum
        self._items = None
        with trl_figures(self, inputs, idle=repeats):
            results = super().prediction_step(model, filled, prediction_loss_only, ignore_keys)
        self.args.average_tokens_across_devices = False
        loss, *outputs = results
        weight = float(items or 0) if is_sum else self._weight_of(inputs, num_samples)
        if loss is not None:
            scale = 1.0
            if is_own and is_sum and self._items is not None:  # it was divided by these items
                items_of_rank = float(self._items or 0) / self.accelerator.num_processes
                scale = items_of_rank / max(weight, 1.0)
            run.losses.append((float(loss) * scale, 0.0 if repeats else weight))
        if filled is not inputs:
            outputs = [_mapped(lambda values: values[:num_samples], one) for one in outputs]
        return (loss, *outputs)

    def _filled(self, inputs: Batch, run: _Pass) -> Batch:
        """Returns a batch padded to one of few shapes, also with rows of weight 0, if its loss leaves out such rows."""
        shape = run.row.shape
        is_known = self._rule is not None or not self.has_own_loss
        targets = {*self.label_names} & {*inputs}
        if shape is None or not is_known or not targets <= LABELS:
            return inputs
        collator = FillingCollator(None, run.rows.budget.ladder, self._pad)
        return collator.fill(inputs, len(run.row.samples), shape)


def _in_order(compute: Callable[[EvalPrediction], Any], run: _Pass) -> Callable[[Any], Any]:
    """Returns a function that computes metrics of results in dataset order."""

    def compute_in_order(results: EvalPrediction) -> Any:
        parts = (results.predictions, results.label_ids, results.inputs)
        return compute(EvalPrediction(*map(run.in_order, parts)))

    return compute_in_order
