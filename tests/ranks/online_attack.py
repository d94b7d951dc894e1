"""Attacks on the online loader over real gloo ranks, resumed on as many; run by tests/online/test_attack.py."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from itertools import chain

import torch
import torch.distributed as dist

from dynagroup.distributed import DistributedWorld
from tests.online.attack import EPOCHS, Attack, check_rows, judge, leg

torch.set_num_threads(1)
SEEDS = (1, 4, 12, 33)


def gathered(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def main():
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    world = DistributedWorld()
    for seed in SEEDS:
        attack = Attack(seed)
        first, state = leg(attack, world, None, 1, 2)
        second, _ = leg(attack, world, gathered(state), None, None)
        came = {}
        for epochs in (*gathered(first), *gathered(second)):
            for epoch, steps in epochs.items():
                came.setdefault(epoch, Counter()).update(chain.from_iterable(ids for ids, *_ in steps))
        check_rows(gathered(second))
        for epoch in range(EPOCHS):
            judge(attack, epoch, came.get(epoch, Counter()), str(attack))
    print("REPORT " + json.dumps({"rank": dist.get_rank(), "attacks": len(SEEDS)}), flush=True)


if __name__ == "__main__":
    main()
