"""Chats are measured as the tokenizer's template writes them, from lists, datasets and files."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from dynagroup import ConfigError, measure_lengths
from dynagroup.files import measure_files
from tests import models

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"
)
QUESTIONS = ["w1 w2", "w3", "w4 w5 w6 w7"]
CHATS = [
    [{"role": "user", "content": text}, {"role": "assistant", "content": "w9"}]
    for text in QUESTIONS
]
SHAREGPT = [
    [{"from": "human", "value": text}, {"from": "gpt", "value": "w9"}] for text in QUESTIONS
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = models.small_tokenizer()
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def expected(tokenizer: Any) -> list[int]:
    return [len(tokenizer.apply_chat_template(chat)["input_ids"]) for chat in CHATS]


@pytest.mark.parametrize("chats", [CHATS, SHAREGPT], ids=["messages", "ShareGPT"])
def test_chats_in_lists_and_datasets(tokenizer: Any, expected: list[int], chats: Any) -> None:
    assert measure_lengths(chats, tokenizer).tolist() == expected
    table = Dataset.from_dict({"messages": chats})
    assert measure_lengths(table, tokenizer).tolist() == expected


@pytest.mark.parametrize(("column", "chats"), [("messages", CHATS), ("conversations", SHAREGPT)])
def test_chats_in_files_need_no_column(
    tokenizer: Any, expected: list[int], column: str, chats: Any, tmp_path: Path
) -> None:
    path = tmp_path / "chats.jsonl"
    rows = [json.dumps({"id": number, column: chat}) for number, chat in enumerate(chats)]
    path.write_text("\n".join(rows), encoding="utf-8")
    measured = measure_files(path, tokenizer, progress=False)
    assert measured.tolist() == expected


def test_a_tokenizer_without_a_template_is_named() -> None:
    with pytest.raises(ConfigError, match="has no chat template"):
        measure_lengths(CHATS, models.small_tokenizer())


ANSWERS = ["w8", "w7 w6", "w5"]


@pytest.mark.parametrize("kind", ["texts", "chats"])
def test_a_prompt_and_its_completion_are_one_sample(
    tokenizer: Any, kind: str, tmp_path: Path
) -> None:
    rows = []
    whole = []
    for question, text in zip(QUESTIONS, ANSWERS, strict=True):
        prompt: Any = f"{question} "
        completion: Any = text
        if kind == "chats":
            prompt = [{"role": "user", "content": question}]
            completion = [{"role": "assistant", "content": text}]
        rows.append({"id": text, "prompt": prompt, "completion": completion})
        whole.append(prompt + completion)
    expected = measure_lengths(whole, tokenizer).tolist()
    assert measure_lengths(Dataset.from_list(rows), tokenizer).tolist() == expected
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert measure_files(path, tokenizer, progress=False).tolist() == expected
    prompts = measure_files(path, tokenizer, "prompt", progress=False)
    assert (prompts < expected).all()
