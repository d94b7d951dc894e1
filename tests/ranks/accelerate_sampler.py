"""What accelerate makes of LengthAwareBatchSampler, on real ranks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from accelerate import Accelerator
from torch.utils.data import DataLoader

from dynagroup.budget.tokens import TokenBudget
from dynagroup.errors import ConfigError
from dynagroup.plan.sampler import LengthAwareBatchSampler

LENGTHS = np.random.default_rng(0).lognormal(4, 1, 200).astype(np.int32).clip(max=512)


def sampler(**options: Any) -> LengthAwareBatchSampler:
    return LengthAwareBatchSampler(LENGTHS, TokenBudget(512), shuffle=True, **options)


def main() -> None:
    accelerator = Accelerator(cpu=True)
    size, rank = accelerator.num_processes, accelerator.process_index
    report: dict[str, Any] = {"rank": rank}

    every = sampler(world_size=size)
    loader = accelerator.prepare(DataLoader(range(200), batch_sampler=every))  # type: ignore[arg-type]
    report["length"] = len(loader)
    report["epochs"] = [[batch.tolist() for batch in loader] for _ in range(2)]

    try:
        prepared = accelerator.prepare(DataLoader(range(200), batch_sampler=sampler()))  # type: ignore[arg-type]
        report["prepared"] = [batch.tolist() for batch in prepared]
    except ConfigError as error:
        report["refused"] = str(error)

    report["own"] = [batch.tolist() for batch in DataLoader(range(200), batch_sampler=sampler())]  # type: ignore[arg-type]

    # resume: a framework that counts its epochs from 0 again after a restart must not lose the place
    saved = sampler(world_size=size)
    first = accelerator.prepare(DataLoader(range(200), batch_sampler=saved))  # type: ignore[arg-type]
    list(first)
    state = saved.state_dict(num_steps=len(saved) // size)
    again = sampler(world_size=size)
    again.load_state_dict(state)
    resumed = accelerator.prepare(DataLoader(range(200), batch_sampler=again))  # type: ignore[arg-type]
    report["resumed"] = [batch.tolist() for batch in resumed]
    print("REPORT " + json.dumps(report), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
