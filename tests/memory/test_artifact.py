"""The shipped artifact, its data, its figures and its report belong together."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dynagroup.memory import MemoryRegressor
from regressor import report
from regressor.rows import load_groups
from regressor.train import Recipe, train

ROOT = Path(__file__).parent.parent.parent
DATA = ROOT / "regressor" / "data" / "simulated.parquet"
SHIPPED = ROOT / "dynagroup" / "memory" / "artifacts" / "pretrained.ubj"


def test_the_artifact_was_trained_on_the_committed_data_and_judged_with_its_recipe():
    card, result = MemoryRegressor.pretrained().card, json.loads(report.RESULTS.read_text())
    assert card["data_sha256"] == result["data_sha256"] == hashlib.sha256(DATA.read_bytes()).hexdigest()
    assert card["recipe"] == result["recipe"]


def test_the_report_is_written_from_the_figures():
    assert report.REPORT.read_text() == report.write(json.loads(report.RESULTS.read_text()))


def test_the_committed_data_and_constants_give_the_trees_bit_for_bit(tmp_path):
    card = MemoryRegressor.pretrained().card
    again = train(load_groups(DATA), Recipe(), constants=card["constants"])
    again.save(tmp_path / "again.ubj")
    assert (tmp_path / "again.ubj").read_bytes() == SHIPPED.read_bytes()
    made = json.loads(json.dumps(again.card))
    assert {name: card.get(name) for name in made} == made


@pytest.mark.slow  # half a minute, nearly all of it for the constants
def test_the_committed_data_gives_the_artifact_bit_for_bit(tmp_path):
    again = tmp_path / "pretrained.ubj"
    command = [sys.executable, "-m", "regressor.train", "--no-evaluation", "--artifact", str(again)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert again.read_bytes() == SHIPPED.read_bytes()
    assert again.with_suffix(".json").read_text() == SHIPPED.with_suffix(".json").read_text()
