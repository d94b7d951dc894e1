"""The shipped artifact, its data, its figures and its report belong together."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dynagroup.memory import MemoryRegressor
from regressor import report

ROOT = Path(__file__).parent.parent.parent
DATA = ROOT / "regressor" / "data" / "simulated.parquet"
SHIPPED = ROOT / "dynagroup" / "memory" / "learned" / "artifacts" / "pretrained.ubj"


def test_the_artifact_was_trained_on_the_committed_data_and_judged_with_its_recipe():
    card, result = MemoryRegressor.pretrained().card, json.loads(report.RESULTS.read_text())
    assert card["data_sha256"] == result["data_sha256"] == hashlib.sha256(DATA.read_bytes()).hexdigest()
    assert card["recipe"] == result["recipe"]


def test_the_report_is_written_from_the_figures():
    assert report.REPORT.read_text() == report.write(json.loads(report.RESULTS.read_text()))


@pytest.mark.slow
def test_the_committed_data_gives_the_artifact_bit_for_bit(tmp_path):
    again = tmp_path / "pretrained.ubj"
    command = [sys.executable, "-m", "regressor.train", "--no-evaluation", "--artifact", str(again)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert again.read_bytes() == SHIPPED.read_bytes()
    assert again.with_suffix(".json").read_text() == SHIPPED.with_suffix(".json").read_text()
