"""Real gloo ranks for the adapters' tests: each runs a function of a script in a process of its own."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp


def _run(rank: int, size: int, port: int, function: Callable[..., Any], folder: str, args: tuple) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        ACCELERATE_USE_CPU="true",
    )
    torch.set_num_threads(1)
    torch.save(function(*args), f"{folder}/{rank}.pt")


def on_ranks(size: int, function: Callable[..., Any], folder: Any, *args: Any) -> list[Any]:
    """What ``function(*args)`` returns on each of ``size`` ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(_run, (size, port, function, str(folder), args), nprocs=size, start_method="spawn")
    return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(size)]
