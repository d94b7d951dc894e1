"""The end of an update: ranks average their gradients, and agree on what became of it."""

from __future__ import annotations

import math

from dynagroup.budget.learning import COST_UNIT, NO_COST
from dynagroup.distributed import World
from dynagroup.errors import BudgetError
from dynagroup.oom.attempts import PartRunner
from dynagroup.oom.gradients import GradientExchange, broadcast_buffers
from dynagroup.oom.parts import Update, Verdict

__all__ = ["finish"]


# Every rank completes the same exchanges and then casts one vote, whatever has happened to it: so no rank waits for one that
# will not come. If any rank's share was worthless (memory ran out while it was sending), all repeat the update from their
# recorded random states, this time sending nothing before all have succeeded. If some rank has a sample that does not fit
# even alone, all raise. Ends, since every repetition has cut at least one batch. Cost: one exchange of gradients as in DDP,
# one small all-reduce.
def finish(update: Update, runner: PartRunner, world: World) -> None:
    """All ranks raise alike, or all hold the mean of their gradients.

    Raises:
        BudgetError: samples of some rank do not fit; gradients are then what they were before the update.
    """
    while True:
        spoiled, fatal, present = _exchange_and_vote(update, runner, world)
        if fatal:
            update.abandon()
            raise BudgetError(_agreed_verdict(update.verdict, runner.min_samples, world))
        if not spoiled:
            break
        update.undo()
        update.exchange = None
        runner.run_waiting(update, last=False)
    if runner.ddp is None:
        return update.add_to_before()
    update.put_into_before()
    for parameter, anywhere in zip(update.parameters, present, strict=True):
        if not anywhere:
            parameter.grad = None
    broadcast_buffers(runner.ddp)


def _exchange_and_vote(update: Update, runner: PartRunner, world: World) -> tuple[bool, bool, list[int]]:
    if runner.ddp is not None:
        update.add_before()
    present = [int(p.grad is not None) for p in update.parameters]
    if runner.ddp is not None:
        exchange = update.exchange or GradientExchange(update.parameters, runner.ddp.process_group)
        exchange.finish()
    spoiled = update.exchange is not None and update.exchange.spoiled
    cost = -NO_COST if math.isinf(update.failed_cost) else -int(update.failed_cost * COST_UNIT)
    spoiled, fatal, cost, *present = world.all_max([spoiled, update.verdict is not None, cost, *present])
    if cost != -NO_COST and world.size > 1:
        runner.learned.record_failed_cost(-cost / COST_UNIT)
        update.failed_cost = math.inf
    return bool(spoiled), bool(fatal), present


def _agreed_verdict(verdict: Verdict | None, min_samples: int, world: World) -> str:
    rank = world.all_max([world.rank if verdict is not None else -1])[0]
    own = verdict if verdict is not None and world.rank == rank else Verdict(-1, -1, -1)
    index, num_samples, longest = world.all_max([own.index, own.num_samples, own.longest])
    what = f"sample {index} does" if num_samples == 1 else f"{num_samples} samples from sample {index} on do"
    return (
        f"{what} not fit on rank {rank} even alone (longest: {longest} tokens, min_samples={min_samples}); "
        "truncate or filter out such samples, or free memory on the device"
    )
