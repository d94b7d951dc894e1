"""Ray Data measures lengths as this process does; run by scripts/test_ray.sh, where Ray is installed."""

from __future__ import annotations

import numpy as np
import pytest

from dynagroup import measure_lengths
from tests.oom.texts import TEXTS, small_tokenizer

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_lengths_on_a_local_cluster_are_those_of_this_process():
    import ray.data

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    tokenizer = small_tokenizer()
    count = lambda batch: {"length": measure_lengths(list(batch["text"]), tokenizer, progress=False)}  # noqa: E731
    rows = ray.data.from_items([{"text": text} for text in TEXTS], override_num_blocks=3)
    batches = rows.map_batches(count, batch_size=7).iter_batches()
    assert np.concatenate([batch["length"] for batch in batches]).tolist() == measure_lengths(TEXTS, tokenizer).tolist()
    ray.shutdown()
