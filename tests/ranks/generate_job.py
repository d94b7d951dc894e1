"""Generate for a dataset; optionally die without a word after some batches. Under torchrun, or alone."""

import json
import os
import signal
import sys

import torch
import torch.distributed as dist

from dynagroup.budget.tokens import TokenBudget
from dynagroup.oom import generate_dataset, storage
from tests.oom.texts import TEXTS, small_llama, small_tokenizer


def main(output: str, die_after: int) -> None:
    torch.set_num_threads(1)
    rank = 0
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    append, count = storage.Output.append, 0

    def dying(self: storage.Output, indices: list[int], results: list[str]) -> None:
        nonlocal count
        count += 1
        if count == die_after and rank == 0:
            with next(self.journal.glob("*.journal")).open("ab") as file:  # killed in the middle of a write
                file.write(b"\x07\x00\x00\x00\x01\x02")
            os.kill(os.getpid(), signal.SIGKILL)
        append(self, indices, results)

    storage.Output.append = dying  # type: ignore[method-assign]
    results = generate_dataset(
        small_llama(), small_tokenizer(), TEXTS, budget=TokenBudget(40), output=output, max_new_tokens=4, progress=False
    )
    print("REPORT " + json.dumps({"rank": rank, "results": results, "batches": count}))


main(sys.argv[1], int(sys.argv[2]))
