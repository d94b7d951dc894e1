"""Real DDP on gloo ranks in float64: the accumulated gradient of every update against one process on its samples."""

from __future__ import annotations

import contextlib
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynagroup import OnlineDataLoader, TokenBudget
from tests.online.helpers import Tokens, collate, ids_in, lengths_of

torch.set_num_threads(1)
LENGTHS = lengths_of(80, seed=6)


class Causal(nn.Module):
    """Next-token loss, averaged over the predicted tokens of a batch, as causal models compute it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(80, 6, dtype=torch.float64)
        self.head = nn.Linear(6, 80, dtype=torch.float64)

    def forward(self, batch):
        hidden = torch.tanh(self.embed(batch["input_ids"].clamp(min=0))).cumsum(1) * 0.1
        logits = self.head(hidden)[:, :-1]
        labels = batch["labels"][:, 1:]
        return nn.functional.cross_entropy(logits.reshape(-1, 80), labels.reshape(-1), ignore_index=-100)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    worst = {}
    for name, options in {
        "free": {},
        "accumulation": {"accumulation": 3},
        "update": {"samples_per_update": 16},
    }.items():
        torch.manual_seed(0)
        model = Causal()
        whole = Causal()
        whole.load_state_dict(model.state_dict())
        parallel = DistributedDataParallel(model)
        data = Tokens([max(2, n) for n in LENGTHS])
        loader = OnlineDataLoader(data, TokenBudget(128), collate_fn=collate, window=8, shuffle=True, **options)
        held, difference, idle = [], 0.0, 0
        for step in loader:
            with contextlib.nullcontext() if step.ends_update else parallel.no_sync():
                (parallel(step.batch) * step.loss_scale).backward()
            held += ids_in(step)
            idle += step.idle
            if step.ends_update:
                everyone = [None] * dist.get_world_size()
                dist.all_gather_object(everyone, held)
                whole.zero_grad()
                whole(collate([data[i] for ids in everyone for i in ids])).backward()
                for ours, truth in zip(model.parameters(), whole.parameters(), strict=True):
                    scale = truth.grad.abs().max().item() or 1.0
                    difference = max(difference, (ours.grad - truth.grad).abs().max().item() / scale)
                parallel.zero_grad()
                held = []
        worst[name] = difference
    print("REPORT " + json.dumps({"rank": rank, "difference": worst}), flush=True)


if __name__ == "__main__":
    main()
