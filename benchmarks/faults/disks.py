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


def repeated_word(place: int, times: int) -> str:
    return " ".join([f"w{place}"] * times)


class Job:
    """Text ``i`` is the word ``i``, as often as it is long; its answer is that word three times.

    Args:
        calls_left: the process is killed when so many batches have been generated.
    """

    def __init__(self, case: Case, calls_left: float = math.inf) -> None:
        self.texts = [repeated_word(place, n) for place, n in enumerate(case.lengths)]
        self.max_tokens = case.max_tokens
        self.calls_left = calls_left
        self.output = case.folder / "out.jsonl"
        self.asked = case.folder / "asked.txt"

    def run(self) -> list[str]:
        model = build("tiny").eval()
        model.generate = self._generate
        budget = TokenBudget(self.max_tokens + 80 * NEW)
        return generate_dataset(
            model,
            word_tokenizer(300),
            self.texts,
            budget=budget,
            output=self.output,
            max_new_tokens=NEW,
            progress=False,
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
        if not self.asked.exists():
            return []
        return [int(line) for line in self.asked.read_text().split()]

    def wrong(self, found: list[str]) -> list[str]:
        """What is wrong with what the job gave back, and with what it wrote."""
        answers = [repeated_word(place, NEW) for place in range(len(self.texts))]
        wrong = []
        if found != answers:
            wrong.append("a job gave back wrong results")
        lines = self.output.read_text(encoding="utf-8").splitlines()
        written = [json.loads(line) for line in lines]
        expected = [{"index": i, "result": answer} for i, answer in enumerate(answers)]
        if written != expected:
            wrong.append("a job's file holds other results")
        return wrong


def _again(job: Job, most_repeated: int) -> list[str]:
    """The same job, by a process that lives. What was finished and whole is not done again."""
    wrong = job.wrong(job.run())
    repeated = sum(job.num_asked()) - len(job.texts)
    if repeated > most_repeated:
        wrong.append(f"{repeated} samples were done again, {most_repeated} were not yet safe")
    return wrong


def disk_full(case: Case) -> list[str]:
    """No file may grow beyond a random size; with room again, the same call finishes the job."""
    most_bytes = case.rng.randrange(1, 60 * len(case.lengths) + 500)
    job = Job(case)

    def run(_rank: int) -> list[str]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead of the process
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
        return job.wrong(job.run())

    report = forked(1, run)[0]
    if isinstance(report, list):
        return report
    wrong = []
    if "File too large" not in report and "No space" not in report:
        wrong.append(f"a full disk ends in {report}")
    return wrong + _again(job, max(job.num_asked(), default=0))


def _killed(case: Case) -> list[str]:
    batches = case.rng.randrange(0, 6)
    report = forked(1, lambda _rank: Job(case, batches).run())[0]
    if report == KILLED or isinstance(report, list):
        return []
    return [f"a job to be killed ended with {report}"]


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
    before = data[:place]
    behind = data[place:]
    inserted = rng.randbytes(rng.randrange(1, 9))
    num_skipped = rng.randrange(9)
    ways = [
        data[: len(data) // 2],
        before,
        before + bytes(len(behind)),
        before + inserted + behind[num_skipped:],
        before[:-1] + bytes([before[-1] ^ 1]) + behind if place else data[1:],
        data + behind,
    ]
    return rng.choice(ways)


FAULTS = {
    "disk full": disk_full,
    "killed while writing results": killed_while_writing,
    "journal cut or damaged": journal_damaged,
}
