"""A real gloo rank with workers that follows a schedule, resumes, and changes sizes; run by tests/online/test_schedules.py."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

from tests.online.test_schedules import RAMP, online, updates_of

torch.set_num_threads(1)
WORKERS = {"num_workers": 1, "prefetch_factor": 2}


def main():
    dist.init_process_group("gloo")
    loader = online(None, samples_per_update=RAMP, **WORKERS)
    whole = [updates_of(loader), updates_of(loader)]
    first = online(None, samples_per_update=RAMP, **WORKERS)
    for number, _ in enumerate(first.updates()):
        if number == 2:
            break
    resumed = online(None, samples_per_update=RAMP, **WORKERS)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = [updates_of(resumed), updates_of(resumed)]
    changing, sizes, at = online(None, samples_per_update=12, **WORKERS), [], -1
    for number, update in enumerate(changing.updates()):
        sizes.append(int(update[0].samples.total))
        if number == 1:
            at = changing.set_samples_per_update(20)
    report = {"rank": dist.get_rank(), "whole": whole, "resumed": rest, "changed": sizes, "first": at}
    print("REPORT " + json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
