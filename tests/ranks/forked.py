"""Ranks of a job of ``tests.torchrun.on_ranks``: this process imports what the job needs, once, and forks the ranks, each
with the environment that torchrun gives it, and with the store here, as in torchrun. usage: python forked.py FOLDER RANKS"""

import faulthandler
import gc
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.distributed import TCPStore

PATIENCE_S = 900.0
"""A rank that hangs says where, before its test gives up."""


def run(
    folder: str, environment: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """One rank, which leaves at once when it is done."""
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    os.environ.update(environment)
    torch.set_num_threads(1)
    result = function(*args)
    torch.save(result, f"{folder}/{environment['RANK']}.pt")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def environment_of(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def main(folder: str, ranks: int) -> int:
    function, args = torch.load(f"{folder}/job.pt", weights_only=False)
    gc.freeze()  # else each rank would copy the memory of all that was imported when it collects garbage
    port = free_port()
    fork = multiprocessing.get_context("fork")
    processes = []
    for rank in range(ranks):
        environment = environment_of(rank, ranks, port)
        process = fork.Process(target=run, args=(folder, environment, function, args))
        process.start()
        processes.append(process)
    store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in wait(list(running)):
            process = running.pop(sentinel)  # type: ignore[call-overload]
            process.join()
            if process.exitcode != 0:
                for other in running.values():
                    other.kill()
                return 1
    del store
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
