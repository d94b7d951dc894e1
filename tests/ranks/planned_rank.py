"""One rank of a planned loader on real gloo: heavy weights, a stop inside an update, a resume; what it emitted is reported."""

from __future__ import annotations

import json

import torch.distributed as dist

from dynagroup import PlannedDataLoader, TokenBudget
from tests.online.helpers import Tokens, collate, lengths_of

LENGTHS = lengths_of(40, seed=3)


def loader() -> PlannedDataLoader:
    # Two ranks' batches of 6e8 a sample are beyond what 32 bits, or 63 bits in units of 2**-32, hold.
    return PlannedDataLoader(
        Tokens(LENGTHS),
        LENGTHS,
        TokenBudget(96),
        samples_per_update=10,
        collate_fn=collate,
        weigh=lambda batch: 6e8 * len(batch["input_ids"]),
    )


def main() -> None:
    dist.init_process_group("gloo")
    first, ids, scales = loader(), [], []

    def use(step) -> None:
        ids.extend([] if step.idle else step.indices)
        scales.append([step.loss_scale, step.ends_update])

    for number, step in enumerate(first, start=1):
        use(step)
        if number == 3:
            break
    again = loader()
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in again:
        use(step)
    merged = again.stats.merged(again.world)
    print("REPORT", json.dumps({"rank": dist.get_rank(), "ids": ids, "scales": scales, "samples": merged.samples}))


if __name__ == "__main__":
    main()
