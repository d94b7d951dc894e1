"""What is read from a model and its config, and in which dtype a copy of a model runs."""

import pytest
import torch
import transformers as hf

from dynagroup.memory import Measurement, Measurements, ProfiledMemory, Workload
from dynagroup.memory.trace.model import architecture, as_meta_model
from tests import models


def small_llama() -> hf.LlamaConfig:
    return models.llama(vocab=100, width=32, layers=1, heads=2)


def test_an_image_size_may_be_a_pair() -> None:
    config = hf.InternVLConfig()
    assert list(config.vision_config.image_size) == [448, 448]
    assert list(config.vision_config.patch_size) == [14, 14]
    assert architecture(config)["fixed_tokens"] == 32 * 32


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_module_is_traced_in_the_dtype_that_its_workload_has(dtype: str) -> None:
    config = small_llama()
    module = hf.LlamaForCausalLM(config)
    of_module = Workload.from_model(module, "forward", dtype=dtype)
    assert of_module.phases == Workload.from_model(config, "forward", dtype=dtype).phases
    assert module.dtype == torch.float32


def test_adapters_in_float32_stay_so_beside_a_model_in_bfloat16() -> None:
    adapted = as_meta_model(small_llama(), dtype="bfloat16", lora=2)
    copied = as_meta_model(adapted, dtype="bfloat16")
    dtypes = {p.requires_grad: p.dtype for p in copied.parameters()}
    assert dtypes == {False: torch.bfloat16, True: torch.float32}


def test_a_row_without_a_size_ran_out_of_memory() -> None:
    sizes = {(1, 64): 6400, (2, 64): 12800, (1, 128): 12800, (2, 128): 25600, (9, 512): None}
    rows = [Measurement(n, {"tokens": length}, 0, size) for (n, length), size in sizes.items()]
    assert [row.oom for row in rows] == [False, False, False, False, True]
    profile = ProfiledMemory.fit(Measurements(tuple(rows), Workload()))
    assert profile.reach == {"tokens": 128}
