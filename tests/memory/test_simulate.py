"""The simulator against what is known: hand counts, CUDA's kernel choices, errors; every architecture that transformers builds
from a small config is predicted at least as large; and the GPU's measuring script runs without a GPU."""

import signal
import warnings
from typing import Any

import pytest
import torch
import transformers as hf

from dynagroup.errors import ConfigError
from dynagroup.memory import TracedMemory, Workload, measure, simulate
from dynagroup.shapes import BatchShape
from regressor import measure_gpu
from regressor.measure_gpu import DRY, DryDevice, measure_all, report
from tests import models

SMALL = models.llama(vocab=500, width=64, heads=4, num_key_value_heads=2)


def batch_bytes(config, shapes, mode="train", **known):
    rows = simulate(config, Workload.from_model(config, mode, trace=False, **known), shapes)
    return [row.batch_bytes for row in rows]


class Net(torch.nn.Module):
    """Two linear layers; or, with ``limit``, a model that runs out of memory beyond so many tokens, or asks for a value."""

    def __init__(self, limit=None):
        super().__init__()
        self.config, self.limit, self.scale = SMALL, limit, torch.nn.Parameter(torch.ones(()))
        if limit is None:
            self.up, self.down = torch.nn.Linear(256, 1024, bias=False), torch.nn.Linear(1024, 256, bias=False)

    def forward(self, input_ids=None, x=None, **kwargs):
        if self.limit is None:
            hidden = self.up(x)
            return {"loss": self.down(hidden).sum()}
        if self.limit and input_ids.numel() > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return {"loss": self.scale * (input_ids.float().sum() if self.limit else input_ids.sum().item())}


TRAIN = Workload(mode="train", dtype="float32", optimizer_bytes=8.0)


def test_autocast_casts_a_weight_once_a_forward_pass():
    class Again(Net):
        def forward(self, input_ids=None, x=None, **kwargs):
            hidden = self.up(x)
            return {"loss": sum(self.down(hidden).sum() for _ in range(self.times))}

    def bytes_of(times):
        (model := Again()).times = times
        inputs = lambda *_: {"x": torch.zeros(1, 1, 256)}  # noqa: E731
        return simulate(model, TRAIN.replace(autocast="bfloat16"), [(1, 1)], inputs=inputs).rows[0].batch_bytes

    assert bytes_of(20) - bytes_of(2) < 2 * 2 * 1024 * 256  # not as much as two further copies


def test_a_linear_model_and_dropout_without_scores_are_counted_by_hand():
    def inputs(model, num_samples, longest):
        return {"x": torch.zeros(num_samples, longest["tokens"], 256)}

    (row,) = simulate(Net(), TRAIN, [(4, 128)], inputs=inputs)
    x, hidden, out, weight = 4 * 128 * 256 * 4, 4 * 128 * 1024 * 4, 4 * 128 * 256 * 4, 1024 * 256 * 4
    # In the backward pass: input, hidden, hidden's gradient and a fresh weight gradient are alive together.
    assert x + 2 * hidden + weight <= row.batch_bytes <= x + 2 * hidden + out + weight + 4096
    # CUDA's fused kernels take dropout; the CPU's path would keep L x L scores per head.
    config = models.gpt2(vocab=500, width=64, heads=8, dropout=0.1, n_positions=4096)
    short, long = batch_bytes(config, [(1, 1024), (1, 4096)], attention="flash", dtype="bfloat16")
    assert long / short == pytest.approx(4, rel=0.05)
    eager_short, eager_long = batch_bytes(config, [(1, 1024), (1, 4096)], attention="eager", dtype="bfloat16")
    assert eager_long / eager_short > 10


def test_what_masks_logits_and_caches_cost():
    masked, unmasked = (batch_bytes(SMALL, [(4, 1024)], attention=a, dtype="bfloat16")[0] for a in ("sdpa", "flash"))
    assert masked - unmasked >= 2 * 4 * 1024 * 1024 * 2  # one bias of two bytes a pair, in each of two layers
    wide = models.llama(vocab=50_000, width=64)
    kept, gone = (batch_bytes(wide, [(4, 128)], dtype="bf16", keeps_outputs=keeps)[0] for keeps in (None, False))
    assert kept - gone == pytest.approx(4 * 128 * 50_000 * 2, rel=0.01)
    few, many = (batch_bytes(SMALL, [(8, 64)], "generate", max_new_tokens=t)[0] for t in (16, 1016))
    cache = 2 * 8 * 2 * 16 * 4 * 2  # keys and values, 8 samples, 2 heads of 16, float32, 2 layers: bytes a token
    assert many - few >= 900 * cache


def test_what_cannot_be_simulated_is_named_and_running_out_of_memory_is_a_row_without_a_size():
    model = Net(limit=0)
    with pytest.raises(ConfigError, match=r"needs more than shapes .*measure\(\) on a device"):
        simulate(model, TRAIN, [(1, 8)])
    assert (model.scale.device.type, model.scale.grad) == ("cpu", None)
    rows = measure(Net(limit=100), TRAIN, [(2, 8), (2, 800), (4, 8)], device=Counters(1500, 1700))
    assert [(row.batch_bytes, row.oom) for row in rows] == [(500, False), (None, True), (700, False)]
    assert rows.source == "measured"
    assert rows.rows[0].static_bytes == 1000 + 8


class Counters:
    """An allocator's counters that were written down before, on the CPU."""

    device, reset, allocated = torch.device("cpu"), staticmethod(lambda: None), staticmethod(lambda: 1000)

    def __init__(self, *peaks):
        left = iter(peaks)
        self.peaks = lambda: (next(left), 9999)


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


SHARDS = 12
LEAST = 0.97
LIMIT_S = 180  # of a core for one architecture; most take three
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
OF_ANY = {name: size for size, names in SIZES.items() for name in names}


def small(kind: Any) -> Any:
    """A small config from which a model can be built, or None."""
    for left_out in ((), ("head_dim",), ("num_key_value_heads",), ("head_dim", "num_key_value_heads")):
        try:
            usual = kind()
            config = kind(**{k: v for k, v in OF_ANY.items() if hasattr(usual, k) and k not in left_out})
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
    before = signal.signal(signal.SIGPROF, lambda *_: pytest.fail(f"takes more than {LIMIT_S} s"))
    yield lambda: signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


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
