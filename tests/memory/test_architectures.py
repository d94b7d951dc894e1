"""Every architecture that the installed transformers builds from a small config: what is predicted is at least what is
simulated, or the model is refused in our words."""

import signal
import warnings
from typing import Any

import pytest
import torch
import transformers as hf

from dynagroup.errors import ConfigError
from dynagroup.memory import TracedMemory, simulate
from dynagroup.shapes import BatchShape

SHARDS = 12
LEAST = 0.97
LIMIT_S = 180  # for one architecture; most take three
SHAPES = [(8, 200), (3, 555), (30, 100)]
MAPPINGS = (hf.MODEL_FOR_CAUSAL_LM_MAPPING, hf.MODEL_FOR_MASKED_LM_MAPPING, hf.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING)
KINDS = sorted({kind for mapping in MAPPINGS for kind in mapping}, key=lambda kind: kind.__name__)
SIZES = {
    512: ("vocab_size",),
    64: ("hidden_size", "d_model", "n_embd"),
    3: ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"),
    4: ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
        "num_experts", "num_local_experts", "n_routed_experts"),
    2: ("num_key_value_heads", "num_experts_per_tok", "eos_token_id"),
    128: ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner"),
    32: ("moe_intermediate_size",), 16: ("head_dim",), 0: ("pad_token_id",), 1: ("bos_token_id",),
    2048: ("max_position_embeddings",),
}  # fmt: skip
SMALL = {name: size for size, names in SIZES.items() for name in names}


def small(kind: Any) -> Any:
    """A small config from which a model can be built, or None."""
    for left_out in ((), ("head_dim",), ("num_key_value_heads",), ("head_dim", "num_key_value_heads")):
        try:
            usual = kind()
            config = kind(**{k: v for k, v in SMALL.items() if hasattr(usual, k) and k not in left_out})
            with torch.device("meta"):
                hf.AutoModel.from_config(config)
            return config
        except Exception:  # whatever the architecture's own code raises: other sizes may do
            continue
    return None


def shares(config: Any, mode: str) -> list[float] | None:
    """Prediction over simulation of each shape; None where it is refused."""
    try:
        memory = TracedMemory.of(config, mode, dtype="bfloat16")
        rows = simulate(config, memory.workload, SHAPES)
    except ConfigError:
        return None
    return [float(memory.batch_bytes(BatchShape.of(r.num_samples, dict(r.longest)))[0]) / r.batch_bytes for r in rows]


@pytest.fixture
def timed():
    """Restarts the time that one architecture may take: what hangs is a failure with its name in the traceback."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"takes more than {LIMIT_S} s"))
    yield lambda: signal.alarm(LIMIT_S)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.slow  # a quarter of an hour on one core, all shards together
@pytest.mark.parametrize("mode", ["train", "forward"])
@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_architecture_is_predicted_smaller_than_it_is_simulated(shard, mode, timed):
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in KINDS[shard::SHARDS]:
            timed()
            if (config := small(kind)) is not None:
                found[kind.__name__] = shares(config, mode)
    known = {name: values for name, values in found.items() if values is not None}
    assert {name: values for name, values in known.items() if min(values) < LEAST} == {}
    assert len(known) > len(KINDS) / SHARDS / 2
