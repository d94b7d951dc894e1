"""Ray Train's workers: every sample once over all of them, through a loader of ours and through a DataLoader it prepares."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("ray.train")


def loop(config: dict) -> None:
    import ray.train
    from ray.train.torch import prepare_data_loader
    from torch.utils.data import DataLoader

    from dynagroup import LengthAwareBatchSampler, PlannedDataLoader, TokenBudget

    lengths = [2 + (7 * i) % 40 for i in range(61)]
    loader = PlannedDataLoader(range(61), lengths, TokenBudget(100), samples_per_update=16, weigh="samples")
    planned = [([int(i) for i in step.batch], step.loss_scale, step.ends_update) for step in loader]
    plain = DataLoader(range(61), batch_sampler=LengthAwareBatchSampler(lengths, TokenBudget(100)))
    dealt = [batch.tolist() for batch in prepare_data_loader(plain, add_dist_sampler=False)]
    rank = ray.train.get_context().get_world_rank()
    Path(config["folder"], f"{rank}.json").write_text(json.dumps({"planned": planned, "dealt": dealt}))


@pytest.mark.filterwarnings("ignore")
def test_two_workers_take_every_sample_once_in_equally_many_steps(tmp_path):
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    runtime = {"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "CUDA_VISIBLE_DEVICES": ""}}
    ray.init(num_cpus=2, object_store_memory=10**8, include_dashboard=False, runtime_env=runtime)
    try:
        run = RunConfig(storage_path=str(tmp_path / "ray"))
        folder = {"folder": str(tmp_path)}
        TorchTrainer(loop, train_loop_config=folder, scaling_config=ScalingConfig(num_workers=2), run_config=run).fit()
    finally:
        ray.shutdown()
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for name in ("planned", "dealt"):
        assert len(ranks[0][name]) == len(ranks[1][name])
    emitted = [i for rank in ranks for batch, scale, _ in rank["planned"] if scale for i in batch]
    assert sorted(emitted) == list(range(61))
    assert sorted(i for rank in ranks for batch in rank["dealt"] for i in batch) == list(range(61))
    assert [end for *_, end in ranks[0]["planned"]] == [end for *_, end in ranks[1]["planned"]]
