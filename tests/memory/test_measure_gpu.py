"""The GPU's measuring script without a GPU: everything runs but the counters."""

import pytest

from regressor import measure_gpu
from regressor.measure_gpu import DRY, DryDevice, measure_all, report


@pytest.mark.filterwarnings("ignore:.*pad_token_id.*", "ignore:Passing a tuple of `past_key_values`")
def test_what_fails_or_has_no_time_left_is_written_down_and_the_others_are_measured(tmp_path, monkeypatch, capsys):
    build, now = measure_gpu.as_random_model, iter([0.0] * 5 + [9e9])

    def fails_for_gpt2(config, workload, device):
        if config.model_type == "gpt2":
            raise RuntimeError("no kernel")
        return build(config, workload, device)

    monkeypatch.setattr(measure_gpu, "as_random_model", fails_for_gpt2)
    rows, about = measure_all(["gpt2", "qwen2", "bert"], DRY, DryDevice(), tmp_path / "d", 25, lambda: next(now))
    assert (about["failed"], about["left_out"]) == ({"gpt2": "RuntimeError: no kernel"}, ["bert"])
    assert {(row["model"], row["mode"]) for row in rows} == {("qwen2", "train"), ("qwen2", "generate")}
    assert all(row["error"] == row["simulated_peak_bytes"] / row["peak_bytes"] - 1 for row in rows)
    full = {**rows[0], "peak_bytes": None, "reserved_bytes": None, "error": None, "oom": True}
    shown = report([{**rows[0], "error": 0.06}, full])
    assert "out of memory" in shown
    assert "1 of 2 shapes measured; further off than 5%: qwen2 train (1)" in shown
