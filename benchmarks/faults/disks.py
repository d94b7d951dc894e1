"""Jobs that write results: the disk is full, the process is killed, what it left behind is cut or damaged."""

import json
import math
import os
import random
import resource
import signal
from typing import Any

import torch

from benchmarks.data import word_tokenizer
from benchmarks.faults.case import Case
from benchmarks.faults.processes import KILLED, forked
from benchmarks.machine import build
from dynagroup import TokenBudget, generate_dataset

NEW = 3


class Job:
    """Text ``i`` is the word ``i``, as often as it is long; its answer is that word three times.

    Args:
        calls_left: the process is killed when so many batches have been generated.
    """

    def __init__(self, case: Case, calls_left: float = math.inf) -> None:
        self.texts = [" ".join([f"w{i}"] * n) for i, n in enumerate(case.lengths)]
        self.max_tokens, self.output, self.calls_left = (
            case.max_tokens,
            case.folder / "out.jsonl",
            calls_left,
        )
        self.asked = case.folder / "asked.txt"

    def run(self) -> list[str]:
        model = build("tiny").eval()
        model.generate = self._generate
        budget = TokenBudget(self.max_tokens + 80 * NEW)
        options: dict[str, Any] = {"max_new_tokens": NEW, "progress": False}
        return generate_dataset(
            model, word_tokenizer(300), self.texts, budget=budget, output=self.output, **options
        )

    def _generate(self, **batch: Any) -> torch.Tensor:
        ids = batch["input_ids"]
        self.calls_left -= 1
        if self.calls_left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        with self.asked.open("a", encoding="utf-8") as file:
            file.write(f"{len(ids)}\n")
        return torch.cat([ids, ids[:, -1:].expand(-1, NEW)], dim=1)  # padded on the left

    def num_asked(self) -> list[int]:
        """Samples of every batch that was generated."""
        return [int(line) for line in self.asked.read_text().split()] if self.asked.exists() else []

    def wrong(self, found: list[str]) -> list[str]:
        """What is wrong with what the job gave back, and with what it wrote."""
        answers = [" ".join([f"w{i}"] * NEW) for i in range(len(self.texts))]
        lines = [json.loads(line) for line in self.output.read_text(encoding="utf-8").splitlines()]
        wrong = [] if found == answers else ["a job gave back wrong results"]
        same = lines == [{"index": i, "result": answer} for i, answer in enumerate(answers)]
        return wrong if same else [*wrong, "a job's file holds other results"]


def _again(job: Job, most_repeated: int) -> list[str]:
    """The same job, by a process that lives. What was finished and whole is not done again."""
    wrong = job.wrong(job.run())
    repeated = sum(job.num_asked()) - len(job.texts)
    if repeated > most_repeated:
        wrong.append(f"{repeated} samples were done again, {most_repeated} were not yet safe")
    return wrong


def disk_full(case: Case) -> list[str]:
    """No file may grow beyond a random size; with room again, the same call finishes the job."""
    most, job = case.rng.randrange(1, 60 * len(case.lengths) + 500), Job(case)

    def run(_rank: int) -> list[str]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead of the process
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        return job.wrong(job.run())

    if isinstance(report := forked(1, run)[0], list):
        return report
    told = "File too large" in report or "No space" in report
    return ([] if told else [f"a full disk ends in {report}"]) + _again(
        job, max(job.num_asked(), default=0)
    )


def _killed(case: Case) -> list[str]:
    batches = case.rng.randrange(0, 6)
    report = forked(1, lambda _rank: Job(case, batches).run())[0]
    return (
        []
        if report == KILLED or isinstance(report, list)
        else [f"a job to be killed ended with {report}"]
    )


def killed_while_writing(case: Case) -> list[str]:
    """The process is killed while it generates; the same call does the rest, and only the rest."""
    return _killed(case) + _again(Job(case), 0)


def journal_damaged(case: Case) -> list[str]:
    """What a killed process left behind is cut in half, cut anywhere, zeroed or changed: done again."""
    wrong = _killed(case)
    for path in case.folder.glob("out.jsonl*/*"):
        path.write_bytes(_damaged(path.read_bytes(), case.rng))
    return wrong + _again(Job(case), len(case.lengths))


def _damaged(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data) + 1)
    ways = [
        data[: len(data) // 2],
        data[:place],
        data[:place] + bytes(len(data) - place),
        data[:place] + rng.randbytes(rng.randrange(1, 9)) + data[place + rng.randrange(9) :],
        data[: place - 1] + bytes([data[place - 1] ^ 1]) + data[place:] if place else data[1:],
        data + data[place:],
    ]
    return rng.choice(ways)


FAULTS = {
    "disk full": disk_full,
    "killed while writing results": killed_while_writing,
    "journal cut or damaged": journal_damaged,
}
