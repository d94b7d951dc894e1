"""One real gloo rank that iterates an online loader and meets a fault; started by tests/online/test_ranks.py."""

from __future__ import annotations

import json
import os
import signal
import sys

import torch
import torch.distributed as dist

from dynagroup import AlignmentError, OnlineDataLoader, TokenBudget
from dynagroup.distributed import DistributedWorld
from tests.online.helpers import Tokens, collate, ids_in, lengths_of

torch.set_num_threads(1)
LENGTHS = lengths_of(2000 if sys.argv[1] in ("rank_killed", "stops_early", "iterates_again") else 200, seed=3)


class Faulty(Tokens):
    def __init__(self, lengths, fault):
        super().__init__(lengths)
        self.fault = fault

    def __getitem__(self, index):
        if self.fault == "item_raises" and index == 77:
            raise KeyError("broken record")
        if self.fault == "worker_dies" and index == 77:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def half_of(sample):
    return len(sample["input_ids"]) // 4


def main(fault, rank, size, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    dist.barrier()  # all are here: from now on only the rank that waits in vain waits long
    world = DistributedWorld(timeout_s=6.0 if fault == "stops_early" else 600.0)
    strange = rank == 1
    options = {"seed": 5} if fault == "other_seed" and strange else {}
    if fault == "wrong_lengths" and strange:
        options["length_of"] = half_of
    loader = OnlineDataLoader(
        Faulty(LENGTHS, fault),
        TokenBudget(128),
        collate_fn=collate,
        window=8,
        world=world,
        num_workers=2 if fault == "worker_dies" else 0,
        **options,
    )
    ids, steps = [], 0
    for step in loader:
        ids += ids_in(step)
        steps += 1
        if fault == "rank_killed" and strange and steps == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stops_early" and strange and steps == 3:
            sys.stdin.read()  # alive, but never at another exchange
            return {"ids": ids, "steps": steps}
        if fault == "iterates_again" and strange and steps == 3:
            next(iter(loader))
    return {"ids": ids, "steps": steps, "exchanges": loader.stats.exchanges, "bytes": loader.stats.exchanged_bytes}


if __name__ == "__main__":
    fault, rank, size, store = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    try:
        report = main(fault, rank, size, store)
    except (AlignmentError, RuntimeError, ValueError) as error:
        report = {"error": type(error).__name__, "text": str(error)}
    print("REPORT " + json.dumps(report), flush=True)
    if fault != "rank_killed":  # whose neighbours in gloo's ring notice; the third notices when those have left
        sys.stdin.read()  # until all have reported: a rank that has left is another fault
    os._exit(0)  # without the orderly end that a broken group would hang in
