"""The few collectives: exact, alike in every stand-in, and closed with the group they stand beside."""

import gc
import multiprocessing
import os
import signal
import threading
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from dynagroup import (
    AlignmentError,
    ConfigError,
    LengthAwareBatchSampler,
    OnlineDataLoader,
    PlannedDataLoader,
    distributed,
)
from dynagroup.distributed import DistributedWorld, SingleProcess, current_world
from dynagroup.testing import run_ranks


@pytest.fixture
def gloo():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def opened() -> tuple[int, int]:
    """Files and threads."""
    gc.collect()  # what other tests left behind
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts what Linux shows")
def test_all_worlds_of_a_job_share_one_group_that_is_closed_with_it():
    counts = []
    for _ in range(4):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        subgroup = dist.new_group([0])
        assert DistributedWorld(subgroup).all_max([3]) == [3]
        assert DistributedWorld().all_max([3]) == [3]
        files, threads = opened()
        for _ in range(20):
            assert DistributedWorld().all_sum([1]) == [1.0]
        files_of_many, threads_of_many = opened()
        assert files_of_many <= files
        assert threads_of_many <= threads
        del subgroup
        dist.destroy_process_group()
        counts.append(opened())
    files_of_jobs, threads_of_jobs = zip(*counts, strict=True)
    assert files_of_jobs[-1] <= files_of_jobs[0]
    assert threads_of_jobs[-1] <= threads_of_jobs[0]


def test_a_group_that_does_not_connect_is_given_up_long_before_its_own_timeout(gloo, monkeypatch):
    """Its other ranks were killed before they made it."""
    never = threading.Event()
    monkeypatch.setattr(dist, "new_group", lambda *args, **kwargs: never.wait())
    monkeypatch.setattr(distributed, "CONNECTS_S", 0.01)
    with pytest.raises(AlignmentError, match="lost contact"):
        DistributedWorld(timeout_s=3e6)
    never.set()


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="waits for a process as POSIX does")
def test_a_worker_that_dies_inside_an_exchange_does_not_end_it(gloo, monkeypatch):
    """torch's handler raises wherever the main thread is; the other ranks would wait for the rest of the exchanges."""
    world = DistributedWorld()
    batches = iter(DataLoader(range(8), num_workers=1))
    reduce = dist.all_reduce
    next(batches)
    [worker] = multiprocessing.active_children()

    def dies(*args, **how):
        worker.kill()
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        return reduce(*args, **how)

    handler = signal.getsignal(signal.SIGCHLD)
    monkeypatch.setattr(dist, "all_reduce", dies)
    assert world.all_max([3]) == [3]
    assert signal.getsignal(signal.SIGCHLD) is handler
    assert not worker.is_alive()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_was_exchanged_is_held_by_more_than_its_python_object(gloo, monkeypatch, mode):
    """Else gloo's thread takes a lock of Python as it lets go of it, and a worker that is forked then never starts."""
    sent = []
    reduce = dist.all_reduce

    def noted(vector, **options):
        sent.append(weakref.ref(vector))
        return reduce(vector, **options)

    monkeypatch.setattr(dist, "all_reduce", noted)
    with mode():
        DistributedWorld().all_sum([1.5])
    gc.collect()
    vector = sent[0]()
    assert vector is not None
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    assert any(tensor._base is vector for tensor in tensors)


def test_without_a_group_there_is_one_process(gloo):
    dist.destroy_process_group()
    with pytest.raises(ConfigError, match="torch.distributed is not initialised"):
        DistributedWorld()
    assert isinstance(current_world(), SingleProcess)


def sampler():
    return LengthAwareBatchSampler([1, 2], 10)


def planned():
    return PlannedDataLoader(range(2), [1, 2], 10, weigh="samples")


def online():
    return OnlineDataLoader([[1], [2]], 10, length_of=len, collate_fn=list, weigh="samples")


@pytest.mark.parametrize("make", [sampler, planned, online])
def test_ranks_of_torchrun_that_nobody_has_joined_are_told(make, monkeypatch, request):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "0")
    message = "started this process, but torch.distributed is not initialised"
    with pytest.warns(UserWarning, match=message):
        next(iter(make()))
    request.getfixturevalue("gloo")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(iter(make()))


def test_what_does_not_fit_overflows_alike_everywhere_and_other_lengths_are_told(gloo):
    def largest(world):
        assert world.all_max([2**63 - 1, -(2**63)]) == [2**63 - 1, -(2**63)]
        assert world.all_sum([2**70, 0.1]) == [2.0**70 * world.size, 0.1 * world.size]
        assert world.all_max([]) == []
        assert world.all_sum([]) == []
        for too_large in (2**63, 2**70):
            with pytest.raises(OverflowError):
                world.all_max([too_large])
        with pytest.raises(TypeError):
            world.all_max([1.5])

    largest(SingleProcess())
    largest(DistributedWorld())
    run_ranks(2, largest)
    with pytest.raises(AlignmentError, match="vectors of equal length"):
        run_ranks(2, lambda world: world.all_sum([1.0] * (1 + world.rank)))


def test_each_rank_gets_what_the_others_sent_to_it(gloo):
    def exchanges(world):
        vectors = [np.full(rank, world.rank) for rank in range(world.size)]
        received = world.exchange(vectors)
        assert [vector.tolist() for vector in received] == [
            [sender] * world.rank for sender in range(world.size)
        ]

    exchanges(SingleProcess())
    exchanges(DistributedWorld())
    run_ranks(3, exchanges)
