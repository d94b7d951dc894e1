"""An error in a worker reaches the loop, with its words, traceback and sample, also if its class cannot be sent."""

import json
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

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

LENGTHS = [5, 2, 9, 4, 7, 1, 3, 8]
Refused = type("Refused", (Exception,), {})
# As a class in a function has it: pickle does not find it.
Refused.__qualname__ = "a_function.<locals>.Refused"


class Parts(Exception):
    """Cannot be made of one text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)


class Told(Exception):
    """Torch would pass the text as ``message=``, which this class does not take."""

    message = "told"

    def __init__(self, text: str) -> None:
        super().__init__(text)


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
        if index == 3:
            fail("item")
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
            if number == 3:
                fail("next")
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
        rows = [[1] * len(text) for text in texts]
        return {"input_ids": rows, "attention_mask": rows}


def planned(dataset: Any, **options: Any) -> Any:
    return PlannedDataLoader(
        dataset,
        LENGTHS,
        20,
        collate_fn=collated,
        num_workers=1,
        worker_init_fn=started,
        **options,
    )


def online(dataset: Any, **options: Any) -> Any:
    return OnlineDataLoader(
        dataset,
        Strict(20),
        length_of=length_of,
        window=4,
        collate_fn=collated,
        num_workers=1,
        worker_init_fn=started,
        **options,
    )


def of_texts() -> Any:
    texts = ["a" * length for length in LENGTHS]
    return text_dataloader(
        texts, Tokenizer(), 20, lengths=LENGTHS, num_workers=1, worker_init_fn=started
    )


def measured() -> Any:
    return measure_lengths(Items(LENGTHS), num_proc=2, length_of=length_of, progress=False)


MAKE: dict[str, Callable[[], Any]] = {
    "planned": lambda: planned(Items(LENGTHS), shuffle=False),
    "planned updates": lambda: planned(Together(LENGTHS), samples_per_update=4, shapes=2),
    "online": lambda: online(Items(LENGTHS)),
    "online updates": lambda: online(Together(LENGTHS), samples_per_update=4),
    "stream": lambda: online(Samples(LENGTHS)),
    "texts": of_texts,
    "measured": measured,
}


class Case(NamedTuple):
    """One fault: the loader, where it fails, with which error, and what the message says (a pattern)."""

    loader: str
    place: str
    error: str
    message: str


INDEX = r"dataset samples \[([0-9], )*3(, [0-9])*\] failed: Refused"
BATCH = r"collate_fn failed on (dataset samples|the batch of dataset indices) \[[0-9, ]+\]: Refused"
CASES = [
    Case("planned updates", "together", "local", r"dataset samples \[[0-9, ]+\] failed: Refused"),
    Case("online", "set_epoch", "local", "the dataset failed: Refused"),
    Case("planned", "set_epoch", "local", "the dataset's set_epoch failed: Refused"),
    Case("stream", "iter", "local", "sample 0 of this worker's part failed: Refused"),
    Case("stream", "next", "local", "sample 3 of this worker's part failed: Refused"),
    Case("stream", "state_dict", "local", "the dataset of worker 0 failed: Refused"),
    Case("stream", "next", "told", "sample 3 of this worker's part failed: Told"),
    Case("texts", "tokenizer", "local", "the tokenizer failed: Refused"),
]
for loader in ("planned", "planned updates", "online", "online updates"):
    CASES.append(Case(loader, "item", "local", INDEX))
    CASES.append(Case(loader, "collate_fn", "local", BATCH))
for loader in ("planned", "planned updates", "online", "online updates", "stream", "texts"):
    CASES.append(Case(loader, "worker_init_fn", "local", "worker_init_fn failed: Refused"))
for loader in ("online", "stream", "measured"):
    CASES.append(Case(loader, "length_of", "local", "length_of failed"))
for loader in ("online", "stream"):
    CASES.append(Case(loader, "budget", "local", "making batches failed: Refused"))
for error, name in (("parts", "Parts"), ("plain", "KeyError")):
    CASES.append(Case("planned", "item", error, name))
    CASES.append(Case("online", "item", error, name))
    CASES.append(Case("stream", "next", error, name))
    CASES.append(Case("texts", "tokenizer", error, name))


def outcome(case: Case) -> tuple[str, str]:
    FAULT.update(place=case.place, error=case.error)
    try:
        items = MAKE[case.loader]()
        return "nothing", str(len(list(items)))
    except Exception as error:
        # Torch's error is in a cycle: its workers would wait 5 s.
        traceback.clear_frames(error.__traceback__)
        return type(error).__name__, str(error)


def outcomes() -> list[tuple[str, str]]:
    return [outcome(case) for case in CASES]


@pytest.fixture(scope="module")
def outcome_of() -> dict[Case, tuple[str, str]]:
    """Of all cases, in a process of their own."""
    module = "tests.online.test_worker_errors"
    code = f"import json; from {module} import outcomes; print(json.dumps(outcomes()))"
    command = [sys.executable, "-W", "ignore", "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    pairs = map(tuple, json.loads(ran.stdout.splitlines()[-1]))
    return dict(zip(CASES, pairs, strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case[:3]))
def test_an_error_in_a_worker_arrives_with_its_words_its_traceback_and_the_sample(
    case: Case, outcome_of: dict[Case, tuple[str, str]]
) -> None:
    kind, text = outcome_of[case]
    keeps_its_class = case.error == "plain" and case.loader != "online"
    assert kind == ("KeyError" if keeps_its_class else "RuntimeError"), text
    assert "broken record" in text
    assert "in fail\n" in text, "the traceback says where"
    assert re.search(case.message, text), text


def test_without_workers_an_error_is_the_users_own() -> None:
    class Own(Exception):
        pass

    def broken(samples: Any) -> Any:
        raise Own("broken record")

    with pytest.raises(Own):
        list(PlannedDataLoader(Tokens(LENGTHS), LENGTHS, 20, collate_fn=broken))
