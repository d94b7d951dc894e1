"""The example that is killed and goes on: a real process is killed, and this one ends with the weights of an unbroken run."""

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.torchrun import ROOT

PROGRAM = str(ROOT / "examples" / "train_resume.py")


def start(folder: Path) -> "subprocess.Popen[str]":
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, PROGRAM, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def run_until(last: str, folder: Path) -> list[str]:
    """The lines of a process that is killed when it has printed one that begins with ``last``."""
    lines = []
    with start(folder) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith(last):
                process.kill()
                break
    assert process.returncode == -signal.SIGKILL
    return lines


def run_to_the_end(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of a run in this process."""
    runpy.run_path(PROGRAM)["main"](folder)
    return capsys.readouterr().out.splitlines(keepends=True)


def test_a_killed_program_ends_with_the_weights_of_an_unbroken_run(tmp_path, capsys):
    torch.set_num_threads(1)
    unbroken = run_to_the_end(tmp_path / "unbroken", capsys)
    before = run_until("update 18 of 60:", tmp_path / "killed")
    after = run_to_the_end(tmp_path / "killed", capsys)
    # The program saves after every fourth update. After update 18, that is in its second epoch.
    assert after[0] in unbroken[16::4]
    assert before == unbroken[:18]
    assert after == unbroken[len(unbroken) - len(after) :]
    assert float(after[-1].split()[-1]) < 0.01
    weights = torch.load(tmp_path / "unbroken" / "model.pt")
    resumed = torch.load(tmp_path / "killed" / "model.pt")
    torch.testing.assert_close(resumed, weights, rtol=0, atol=0)
