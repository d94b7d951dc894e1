"""`dynagroup doctor`: what it says where memory decides, and for which device it predicts."""

import html
import json
import re
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dynagroup import MemoryBudget, TokenBudget
from dynagroup.cli import main
from dynagroup.plan.compare import compare
from dynagroup.plan.cost import Work
from dynagroup.shapes import BatchShape
from tests import models
from tests.integrations import toys

LENGTHS = np.random.default_rng(0).integers(20, 400, 300)
CONFIG = models.llama(vocab=500, width=64, layers=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("doctor")
    np.save(path / "lengths.npy", LENGTHS)
    CONFIG.save_pretrained(path / "model")
    return path


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def doctor(folder: Path, memory: str) -> list[str]:
    data = str(folder / "lengths.npy")
    model = str(folder / "model")
    return ["doctor", data, "--batch-size", "8", "--model", model, "--gpu-memory", memory]


@cache
def traced_budget() -> MemoryBudget:
    return MemoryBudget.from_model(CONFIG, "80GB")


def memory_between(samples: int) -> str:
    """A memory of which the usable part is enough for so many of the longest samples, and for no more."""
    budget = traced_budget()
    batch = BatchShape.of([samples, samples + 1], LENGTHS.max())
    least, most = budget.predicted(batch) * 80e9
    return str(round((least + most) / 2 / 0.9))


def test_the_table_is_that_of_the_budget_which_doctor_recommends(folder, capsys) -> None:
    memory = memory_between(samples=3)
    budget = MemoryBudget.from_bytes(float(memory), model=traced_budget().model)
    safe_tokens = budget.max_tokens(LENGTHS.max())
    change, *_ = lines = answer(capsys, *doctor(folder, memory)).splitlines()
    assert f"TokenBudget({safe_tokens})" in change
    work = Work.of(CONFIG, device="cpu")
    expected = compare(LENGTHS, 8, budget=TokenBudget(safe_tokens), work=work)
    assert lines[5:-2] == expected.report().splitlines()


def test_where_no_sample_fits_doctor_says_so_first_and_which_fit_alone(folder, capsys) -> None:
    memory = memory_between(samples=0)
    change, *_ = answer(capsys, *doctor(folder, memory)).splitlines()
    assert "nothing: not one of the longest samples fits" in change
    budget = MemoryBudget.from_bytes(float(memory), model=traced_budget().model)
    fits = budget.fits(BatchShape.of(1, LENGTHS))
    assert 0 < fits.sum() < len(LENGTHS)
    assert f"fit alone: {fits.mean():.1%}, up to {LENGTHS[fits].max()} tokens" in change


def test_where_not_even_the_weights_fit_doctor_says_it_too(folder, capsys) -> None:
    change, *_ = answer(capsys, *doctor(folder, "1MB")).splitlines()
    assert "nothing: not one of the longest samples fits 1MB" in change
    assert "fit alone: none" in change


@pytest.mark.parametrize("command", ["doctor", "compare"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_time_is_predicted_for_the_device_that_is_given(folder, capsys, command, device) -> None:
    data = str(folder / "lengths.npy")
    arguments = [command, data, "--batch-size", "8", "--device", device]
    assert answer(capsys, *arguments).splitlines()[-1] == f"time is predicted for {device}"
    figures = json.loads(answer(capsys, *arguments, "--json"))
    expected = compare(LENGTHS, 8, work=Work.of_known(None, device=device))
    assert figures["ways"] == expected.figures()["ways"]


def page_of(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The page of `doctor --html`, read by a parser that refuses what is not closed."""
    path = folder / "new" / "page.html"
    data = str(folder / "lengths.npy")
    answer(capsys, "doctor", data, "--batch-size", "8", "--html", str(path), *options)
    text = path.read_text(encoding="utf-8")
    ElementTree.fromstring(re.sub(r"<!doctype html>|<meta [^>]*>|<br>", "", text))
    return text


def test_the_page_shows_the_code_first_and_marks_its_row_in_the_table(folder, capsys) -> None:
    page = page_of(folder, capsys)
    comparison = compare(LENGTHS, 8)
    code = f"TokenBudget({8 * LENGTHS.max()}), samples_per_update=8"
    assert page.index(code) < page.index("<table>")
    [row] = re.findall(r'<tr class="chosen">(.*)</tr>', page)
    assert f"{comparison.ways[2].padding:.1%}" in row
    for way in comparison.ways:
        assert f"<dt>{way.name}</dt>" in page


def test_the_page_draws_the_same_samples_twice(folder, capsys) -> None:
    page = page_of(folder, capsys)
    heights = []
    for picture in re.findall(r"<svg role=.img.*?</svg>", page, re.S):
        columns = re.findall(r"V([\d.]+)h", picture)
        heights.append(sorted(map(float, columns)))
    assert heights[0] == heights[1]
    assert 120 < len(heights[0]) < 180


def test_the_page_says_that_nothing_is_to_change(folder, capsys) -> None:
    np.save(folder / "equal.npy", np.full(200, 64))
    page = folder / "equal.html"
    data = str(folder / "equal.npy")
    answer(capsys, "doctor", data, "--batch-size", "8", "--html", str(page))
    text = page.read_text(encoding="utf-8")
    assert "Other batches of the same updates would save little" in text
    assert "recommended)" not in text


def test_the_proposed_budget_pads_as_the_command_says(folder, capsys) -> None:
    data = str(folder / "lengths.npy")
    text = answer(capsys, "doctor", data, "--batch-size", "8", "--pad-to-multiple-of", "16")
    assert ", pad_to_multiple_of=16)" in text


def test_the_beginning_of_an_option_is_enough(folder, capsys) -> None:
    data = str(folder / "lengths.npy")
    whole = answer(capsys, "doctor", data, "--batch-size", "8", "--world-size", "2")
    assert answer(capsys, "doctor", data, "--batch", "8", "--world", "2") == whole


def test_the_code_of_the_page_runs(folder, capsys) -> None:
    page = page_of(folder, capsys)
    [loop, _] = re.findall(r"<pre><code>(.*?)</code></pre>", page, re.S)
    config = models.llama(vocab=40, width=8, layers=1)
    model = AutoModelForCausalLM.from_config(config)
    names = {
        "dataset": [{"input_ids": [1] * n, "labels": [1] * n} for n in LENGTHS.tolist()],
        "lengths": LENGTHS,
        "collate": toys.collate,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    exec(html.unescape(loop), names)
    assert names["loader"].stats.samples == len(LENGTHS)
