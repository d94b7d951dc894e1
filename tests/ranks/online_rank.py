"""One of three real gloo ranks that iterate an online loader until rank 1 is lost; started by tests/online/test_ranks.py."""

import json
import os
import signal
import sys

import torch
import torch.distributed as dist

from dynagroup import AlignmentError
from dynagroup.distributed import DistributedWorld
from tests.online.helpers import lengths_of, make_loader

torch.set_num_threads(1)


def main(fault: str, rank: int, size: int, store: str) -> str:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    dist.barrier()  # all are here: from now on only the rank that waits in vain waits long
    world = DistributedWorld(timeout_s=3.0 if fault == "stops_early" else 600.0)
    for steps, _ in enumerate(make_loader(world, lengths_of(2000, seed=3), window=8), start=1):
        if rank == 1 and steps == 3:
            if fault == "rank_killed":
                os.kill(os.getpid(), signal.SIGKILL)
            sys.stdin.read()  # alive, but never at another exchange
            return ""
    return "ended"


if __name__ == "__main__":
    fault, rank, size, store = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    report = {"error": None}
    try:
        report["text"] = main(fault, rank, size, store)
    except AlignmentError as error:
        report = {"error": type(error).__name__, "text": str(error)}
    print("REPORT " + json.dumps(report), flush=True)
    if fault != "rank_killed":  # whose neighbours in gloo's ring notice; the third notices when those have left
        sys.stdin.read()  # until all have reported: a rank that has left is another fault
    os._exit(0)  # without the orderly end that a broken group would hang in
