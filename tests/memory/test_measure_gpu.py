"""The GPU's measuring script without a GPU: everything runs but the counters, and needs no more than torch and transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from regressor import measure_gpu
from regressor import rows as regressor_rows
from regressor.measure_gpu import DRY, MODELS, DryDevice, main, measure_all, report, save

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pad_token_id.*"),
    pytest.mark.filterwarnings("ignore:Passing a tuple of `past_key_values`"),
]


def test_a_dry_run_covers_every_model_and_both_kinds_of_run(tmp_path, capsys, monkeypatch):
    path = tmp_path / "dry.parquet"
    assert main(["--dry", "--output", str(path)]) == 0
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    rows, about = table.to_pylist(), json.loads(table.schema.metadata[b"dynagroup.about"])
    assert {row["model"] for row in rows} == set(MODELS)
    assert len(MODELS) >= 6
    assert {(row["model"], row["mode"]) for row in rows} >= {(m, "train") for m in MODELS} | {("qwen2", "generate")}
    assert len(rows) == 4 * len(MODELS)
    assert all(row["error"] == row["simulated_peak_bytes"] / row["peak_bytes"] - 1 for row in rows)
    assert (about["source"], about["failed"], about["left_out"]) == ("dry", {}, [])
    assert {"hardware", "versions", "date"} <= set(about)
    assert "qwen2 generate 2 x 16" in capsys.readouterr().out
    monkeypatch.setattr(regressor_rows, "FEWEST_MEASURED", 2)
    tables = regressor_rows.load_measured(path)
    assert len(tables) == 2 * len(MODELS)
    assert {row.num_samples for table in tables for row in table} == {1, 2}
    assert all(table.workload.phases is None and table.workload.num_layers == 1 for table in tables)


def test_it_asks_for_no_package_that_a_bare_machine_lacks(tmp_path):
    code = (
        "import sys\n"
        "for name in ('xgboost', 'datasets', 'pyarrow', 'matplotlib', 'pandas'): sys.modules[name] = None\n"
        "import regressor.measure_gpu as script\n"
        "script.find_spec = lambda name: None\n"
        "sys.exit(script.main(['--dry', '--models', 'qwen2', '--output', sys.argv[1]]))\n"
    )
    path = tmp_path / "dry.parquet"
    shown = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr
    head, *rows = map(json.loads, path.with_suffix(".jsonl").read_text().splitlines())
    assert head["about"]["source"] == "dry"
    assert len(rows) == 4
    assert not path.exists()


def test_no_model_is_begun_that_may_not_end_in_time(tmp_path):
    now = iter([0.0, 0.0, 60.0, 9e9])
    rows, about = measure_all(["gpt2", "qwen2"], DRY, DryDevice(), tmp_path / "d.parquet", 25, lambda: next(now))
    assert {row["model"] for row in rows} == {"gpt2"}
    assert about["left_out"] == ["qwen2"]


def test_a_model_that_fails_is_written_down_and_the_others_go_on(tmp_path, monkeypatch):
    build = measure_gpu.as_random_model

    def fails_for_gpt2(config, workload, device):
        if config.model_type == "gpt2":
            raise RuntimeError("no kernel")
        return build(config, workload, device)

    monkeypatch.setattr(measure_gpu, "as_random_model", fails_for_gpt2)
    rows, about = measure_all(["gpt2", "qwen2"], DRY, DryDevice(), tmp_path / "d.parquet", 25, lambda: 0.0)
    assert about["failed"] == {"gpt2": "RuntimeError: no kernel"}
    assert {row["model"] for row in rows} == {"qwen2"}


def test_out_of_memory_is_shown_and_has_no_error():
    sizes = {"simulated_peak_bytes": 2**30, "peak_bytes": 2**30, "reserved_bytes": 2**30, "oom": False}
    row = {"model": "gpt2", "mode": "train", "num_samples": 1, "longest_tokens": 8, "error": 0.06, **sizes}
    full = {**row, "peak_bytes": None, "reserved_bytes": None, "error": None, "oom": True}
    shown = report([row, full])
    assert "out of memory" in shown
    assert shown.endswith("1 of 2 shapes measured; further off than 5%: gpt2 train (1)")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--models", "gpt17"], "names 'gpt17'"), (["--dry"], "needs an --output of its own")],
)
def test_bad_arguments_say_the_way_out(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def test_without_a_gpu_it_says_so(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match="needs a CUDA device"):
        main(["--output", str(tmp_path / "x.parquet")])
    assert not list(tmp_path.iterdir())


def test_saved_rows_come_back(tmp_path):
    import pyarrow.parquet as pq

    assert save(tmp_path / "a.parquet", [{"model": "x", "batch_bytes": None}], {"date": "today"}).suffix == ".parquet"
    assert pq.read_table(tmp_path / "a.parquet").to_pylist() == [{"model": "x", "batch_bytes": None}]
