"""What a Trainer says before it trains: the layout of batches, and what fixed batches would have cost beside this run."""

from dynagroup.budget.base import Budget, is_packed
from dynagroup.integrations.config import HostTrainer
from dynagroup.integrations.hf_data import Batch, work_of
from dynagroup.plan.compare import GROUPING, Way, compare
from dynagroup.shapes import Streams
from dynagroup.update.loader import StepLoader

NUM_COMPARED = 4096  # most samples of which the banner compares ways to form batches


def banner(trainer: HostTrainer, loader: StepLoader[Batch]) -> list[str]:
    """Returns which layout batches have and why, and padding and steps of fixed batches, of this run, and, if its updates
    are exact, of stratified ones. Costs are missing if updates are not of the arguments' size, or not padded."""
    lines = [] if trainer.layout_line is None else [trainer.layout_line]
    config = trainer.dynagroup
    if config.updates != "preserved" or config.mode != "offline":
        return lines
    if config.samples_per_update is not None:
        return lines  # the compared ways have updates of the arguments' size
    lengths, *_ = loader.examples()
    if is_packed(loader.budget, lengths):
        return lines
    return lines + _costs(trainer, loader.budget, lengths)


def _costs(trainer: HostTrainer, budget: Budget, lengths: Streams) -> list[str]:
    examples = {}
    for name, values in lengths.items():
        examples[name] = values[:: max(1, len(values) // NUM_COMPARED)]
    own_grouping = trainer.dynagroup.grouping
    grouping = own_grouping or GROUPING
    comparison = compare(
        examples,
        trainer.args.per_device_train_batch_size,
        world_size=trainer.args.world_size,  # one rank asks, so nothing here may exchange with others
        accumulation=trainer.accumulation,
        budget=budget,
        work=work_of(trainer),
        grouping=grouping,
    )
    fixed, _, exact, stratified = comparison.ways[:4]
    num_samples = len(fixed.plan.batches.order)
    lines = [
        f"fixed batches: padding {fixed.padding:.0%}, {fixed.plan.num_steps:,} steps "
        f"for {num_samples:,} samples"
    ]
    this_run = " (this run)"
    if own_grouping is None:
        lines.append(f"exact updates{this_run}: {_beside(fixed, exact)}")
        this_run = ""
    quality = "; the same loss in our measurements" if grouping == GROUPING else ""
    lines.append(f"grouping={grouping}{this_run}: {_beside(fixed, stratified)}{quality}")
    return lines


def _beside(fixed: Way, way: Way) -> str:
    speed = fixed.plan.predicted_time / way.plan.predicted_time
    return (
        f"padding {way.padding:.0%}, {way.plan.num_steps:,} steps, "
        f"predicted {speed:.1f} times as fast as fixed batches"
    )
