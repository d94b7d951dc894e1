"""The command line says what the library says, and a user's mistake in one line."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from dynagroup.budget.tokens import TokenBudget
from dynagroup.cli import main
from dynagroup.plan.sampler import LengthAwareBatchSampler

LENGTHS = np.random.default_rng(0).integers(1, 100, 200).astype(np.int32)


@pytest.fixture
def lengths_file(tmp_path):
    np.save(tmp_path / "lengths.npy", LENGTHS)
    return str(tmp_path / "lengths.npy")


def test_plan_prints_the_plans_report(lengths_file, capsys):
    assert main(["plan", "--lengths", lengths_file, "--max-tokens", "800", "--world-size", "4"]) == 0
    expected = LengthAwareBatchSampler(LENGTHS, TokenBudget(800), rank=0, world_size=4).plan.report()
    assert capsys.readouterr().out == expected + "\n"


def test_plan_prints_figures_for_machines(lengths_file, capsys):
    arguments = ["--max-tokens", "800", "--shuffle", "--epoch", "3", "--samples-per-update", "32", "--json"]
    assert main(["plan", "--lengths", lengths_file, *arguments]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["num_samples"] == 200
    assert figures["num_updates"] == 7


@pytest.mark.parametrize("kind", ["npz", "txt"])
def test_lengths_come_in_several_kinds_of_files(tmp_path, kind, capsys):
    path = tmp_path / f"lengths.{kind}"
    if kind == "npz":
        np.savez(path, tokens=LENGTHS, patches=LENGTHS)
    else:
        np.savetxt(path, LENGTHS, fmt="%d")
    assert main(["plan", "--lengths", str(path), "--batch-size", "32", "--max-length", "50", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["real_tokens"] == int(np.minimum(LENGTHS, 50).sum())


def test_plan_saves_a_picture(lengths_file, tmp_path):
    picture = tmp_path / "plan.png"
    assert main(["plan", "--lengths", lengths_file, "--max-tokens", "800", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "nowhere.npy", "--max-tokens", "8"], "names no file"),
        (["--texts", "nowhere.txt", "--max-tokens", "8"], "needs `--tokenizer`"),
        (["--lengths", "LENGTHS", "--max-tokens", "-8"], "`max_tokens` must be greater than 0"),
    ],
)
def test_mistakes_are_one_line_and_status_2(lengths_file, arguments, message, capsys):
    arguments = [lengths_file if a == "LENGTHS" else a for a in arguments]
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dynagroup plan: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_missing_package_is_named_with_what_to_install(lengths_file, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plan", "--lengths", lengths_file, "--max-tokens", "800", "--plot", "x.png"]) == 2
    assert "install dynagroup[viz]" in capsys.readouterr().err


@pytest.fixture
def model_folder(tmp_path):
    from transformers import GPT2Config

    sizes = {"n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 500, "n_positions": 96}
    GPT2Config(**sizes, bos_token_id=None, eos_token_id=None).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_profile_suggests_the_first_batch_size_and_saves_a_picture(model_folder, tmp_path, capsys):
    from transformers import AutoConfig

    from dynagroup.memory import Workload
    from dynagroup.memory.profile import profile

    picture = tmp_path / "profile.png"
    arguments = ["--gpu-memory", "80GB", "--dtype", "bfloat16", "--picture", str(picture)]
    assert main(["profile", model_folder, "--mode", "generate", "--max-new-tokens", "8", *arguments]) == 0
    config = AutoConfig.from_pretrained(model_folder)
    workload = Workload.from_model(config, "generate", dtype="bfloat16", max_new_tokens=8)
    table, memory, _ = profile(config, workload, 80 * 10**9)
    shown = capsys.readouterr().out
    assert shown.splitlines()[1:-1] == table.splitlines()[1:]
    longest_fits = memory.largest(np.array([96]), 0.9 * 80e9)[0]
    assert f"for samples of up to 96 tokens: MemoryBudget(batch_size={longest_fits}, longest=96)" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_profile_says_what_simulate_says_of_given_shapes(model_folder, tmp_path, capsys):
    from transformers import AutoConfig

    from dynagroup.memory import Measurements, Workload, simulate

    saved, picture = tmp_path / "found.parquet", str(tmp_path / "profile.png")
    arguments = ["--shapes", "2x32", "4x64", "--dtype", "bfloat16", "--output", str(saved), "--picture", picture]
    assert main(["profile", model_folder, *arguments]) == 0
    config = AutoConfig.from_pretrained(model_folder)
    expected = simulate(config, Workload.from_model(config, "train", dtype="bfloat16"), [(2, 32), (4, 64)])
    assert list(Measurements.from_parquet(saved))[:2] == list(expected)
    table = capsys.readouterr().out
    assert "4 x 64" in table
    assert "peak GiB" in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu-memory", "lots"], "80GB or 24GiB, but is 'lots'"),
        (["--headroom", "1.5"], "at most 1.0, but is 1.5"),
        (["--dtype", "int3"], "`dtype` must be one of"),
    ],
)
def test_profile_refuses_what_makes_no_sense(model_folder, arguments, message, capsys):
    assert main(["profile", model_folder, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_profile_without_a_device_to_measure_on_says_so(model_folder, capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["profile", model_folder, "--measure"]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_a_shape_is_samples_x_tokens(capsys):
    with pytest.raises(SystemExit):
        main(["profile", "x", "--shapes", "8by512"])
    assert "such as 8x512, but is '8by512'" in capsys.readouterr().err


def test_python_m_dynagroup_runs():
    shown = subprocess.run([sys.executable, "-m", "dynagroup", "--help"], capture_output=True, text=True, check=True)
    assert all(command in shown.stdout for command in ("plan", "profile", "demo"))
