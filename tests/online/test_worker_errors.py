"""An error in a worker reaches the loop, with its words, traceback and sample, also if its class cannot be sent."""

import json
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import get_worker_info

from dynagroup import (
    OnlineDataLoader,
    PlannedDataLoader,
    TokenBudget,
    measure_lengths,
    text_dataloader,
)
from tests.online.helpers import Stream, Tokens, collate

Refused, LENGTHS = type("Refused", (Exception,), {}), [5, 2, 9, 4, 7, 1, 3, 8]


class Parts(Exception):
    """Cannot be made of one text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)


class Told(Exception):
    """Torch would pass the text as ``message=``, which this class does not take."""

    message = "told"

    def __init__(self, text: str) -> None:
        super().__init__(text)


Refused.__qualname__ = (
    "a_function.<locals>.Refused"  # as a class in a function has it: pickle does not find it
)
ERRORS = {
    "local": Refused("broken record"),
    "parts": Parts(7, "broken record"),
    "told": Told("broken record"),
    "plain": KeyError("broken record"),
}
FAULT = {"place": "", "error": ""}


def fail(place: str) -> None:
    if place == FAULT["place"] and get_worker_info() is not None:
        raise ERRORS[FAULT["error"]]


class Items(Tokens):
    def __getitem__(self, index: int) -> Any:
        fail("item" if index == 3 else "")
        return super().__getitem__(index)

    def set_epoch(self, epoch: int) -> None:
        fail("set_epoch")


class Together(Items):
    def __getitems__(self, indices: list[int]) -> Any:
        fail("together")
        return [self[index] for index in indices]


class Samples(Stream):
    def __iter__(self) -> Any:
        fail("iter")
        for number, sample in enumerate(super().__iter__()):
            fail("next" if number == 3 else "")
            yield sample

    def state_dict(self) -> Any:
        fail("state_dict")

    def load_state_dict(self, state: Any) -> None: ...


class Strict(TokenBudget):
    def fits(self, shape: Any, /) -> Any:
        fail("budget")
        return super().fits(shape)


def collated(samples: list[Any]) -> Any:
    fail("collate_fn")
    return collate(samples)


def started(worker: int) -> None:
    fail("worker_init_fn")


def length_of(sample: Any) -> int:
    fail("length_of")
    return len(sample["input_ids"])


class Tokenizer:
    pad_token_id = 0

    def __call__(self, texts: list[str], **how: Any) -> Any:
        fail("tokenizer")
        return {
            "input_ids": [[1] * len(text) for text in texts],
            "attention_mask": [[1] * len(text) for text in texts],
        }


WORKERS: dict[str, Any] = {"num_workers": 1, "worker_init_fn": started}
LOADER: dict[str, Any] = {"collate_fn": collated, **WORKERS}
FEW: dict[str, Any] = {"shapes": 2, **LOADER}
ONLINE: dict[str, Any] = {"budget": Strict(20), "length_of": length_of, "window": 4, **LOADER}
MAKE: dict[str, Callable[[], Any]] = {
    "planned": lambda: PlannedDataLoader(Items(LENGTHS), LENGTHS, 20, shuffle=False, **LOADER),
    "planned updates": lambda: PlannedDataLoader(
        Together(LENGTHS), LENGTHS, 20, samples_per_update=4, **FEW
    ),
    "online": lambda: OnlineDataLoader(Items(LENGTHS), **ONLINE),
    "online updates": lambda: OnlineDataLoader(Together(LENGTHS), samples_per_update=4, **ONLINE),
    "stream": lambda: OnlineDataLoader(Samples(LENGTHS), **ONLINE),
    "texts": lambda: text_dataloader(
        ["a" * n for n in LENGTHS], Tokenizer(), 20, lengths=LENGTHS, **WORKERS
    ),
    "measured": lambda: [
        measure_lengths(Items(LENGTHS), num_proc=2, length_of=length_of, progress=False)
    ],
}
INDEX = r"dataset samples \[([0-9], )*3(, [0-9])*\] failed: Refused"
BATCH = r"on (dataset samples|the batch of dataset indices) \[[0-9, ]+\]"
CASES: list[tuple[str, str, str, str]] = [
    *(
        (f"planned{s}", place, "local", said)
        for s in ("", " updates")
        for place, said in (("item", INDEX), ("collate_fn", f"collate_fn failed {BATCH}: Refused"))
    ),
    ("planned updates", "together", "local", r"dataset samples \[[0-9, ]+\] failed: Refused"),
    *(
        (f"online{s}", place, "local", said)
        for s in ("", " updates")
        for place, said in (("item", INDEX), ("collate_fn", f"collate_fn failed {BATCH}: Refused"))
    ),
    *(
        (loader, "worker_init_fn", "local", "worker_init_fn failed: Refused")
        for loader in [*MAKE][:-1]
    ),
    *(
        (loader, "length_of", "local", "length_of failed")
        for loader in ("online", "stream", "measured")
    ),
    *(
        (loader, "budget", "local", "making batches failed: Refused")
        for loader in ("online", "stream")
    ),
    ("online", "set_epoch", "local", "the dataset failed: Refused"),
    ("planned", "set_epoch", "local", "the dataset's set_epoch failed: Refused"),
    ("stream", "iter", "local", "sample 0 of this worker's part failed: Refused"),
    ("stream", "next", "local", "sample 3 of this worker's part failed: Refused"),
    ("stream", "state_dict", "local", "the dataset of worker 0 failed: Refused"),
    ("stream", "next", "told", "sample 3 of this worker's part failed: Told"),
    ("texts", "tokenizer", "local", "the tokenizer failed: Refused"),
    *(
        (loader, place, error, kind)
        for error, kind in (("parts", "Parts"), ("plain", "KeyError"))
        for loader, place in (
            ("planned", "item"),
            ("online", "item"),
            ("stream", "next"),
            ("texts", "tokenizer"),
        )
    ),
]


def outcomes() -> list[tuple[str, str]]:
    found = []
    for loader, place, error, _ in CASES:
        FAULT.update(place=place, error=error)
        try:
            found.append(("nothing", str(len(list(MAKE[loader]())))))
        except Exception as caught:
            found.append((type(caught).__name__, str(caught)))
            traceback.clear_frames(
                caught.__traceback__
            )  # torch's error is in a cycle: its workers would wait 5 s
    return found


def test_an_error_in_a_worker_arrives_with_its_words_its_traceback_and_the_sample() -> None:
    code = "import json; from tests.online.test_worker_errors import outcomes; print(json.dumps(outcomes()))"
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 240, "check": True}
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", code], **how)
    for case, (kind, text) in zip(CASES, json.loads(ran.stdout.splitlines()[-1]), strict=True):
        assert kind == (
            "KeyError" if (case[2] == "plain" and case[0] != "online") else "RuntimeError"
        ), (case, text)
        assert "broken record" in text, case
        assert "in fail\n" in text, f"{case}: the traceback says where"
        assert re.search(case[3], text), (case, text)


def test_without_workers_an_error_is_the_users_own() -> None:
    class Own(Exception):
        pass

    def broken(samples: Any) -> Any:
        raise Own("broken record")

    with pytest.raises(Own):
        list(PlannedDataLoader(Tokens(LENGTHS), LENGTHS, 20, collate_fn=broken))
