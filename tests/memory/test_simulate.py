"""The simulator against what is known: hand counts, CUDA's kernel choices, and errors."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from dynagroup.errors import ConfigError
from dynagroup.memory import Workload, measure, simulate
from tests import models

SMALL = models.llama(vocab=500, width=64, heads=4, num_key_value_heads=2)


def batch_bytes(config, shapes, mode="train", **known):
    return [
        row.batch_bytes for row in simulate(config, Workload.from_model(config, mode, trace=False, **known), shapes)
    ]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads what Linux shows")
def test_a_7b_model_is_traced_and_simulated_in_little_memory():
    """Llama 2 7B's sizes: 13 GB of weights in bfloat16, none of which is allocated."""
    code = (
        "from pathlib import Path; from transformers import LlamaConfig; from dynagroup.memory import Workload, simulate\n"
        "workload = Workload.from_model(LlamaConfig(), dtype='bfloat16', gradient_checkpointing=True)\n"
        "assert workload.num_parameters > 6.7e9 and workload.phases is not None\n"
        "simulate(LlamaConfig(), workload, [(4, 2048)])\n"
        "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"  # ru_maxrss has the parent's, too
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 4 * 2**20  # KiB


def test_static_memory_is_parameters_gradients_and_optimizer_state():
    workload = Workload.from_model(SMALL, dtype="bfloat16", trace=False)
    (row,) = simulate(SMALL, workload, [(1, 8)])
    assert row.static_bytes == pytest.approx(workload.num_parameters * (2 + 2 + 4), rel=0.05)
    (with_ddp,) = simulate(SMALL, workload.replace(ddp=True), [(1, 8)])
    assert with_ddp.static_bytes - row.static_bytes == pytest.approx(2 * workload.num_parameters, rel=0.05)


def test_a_linear_model_without_surprises_is_counted_by_hand():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config = SMALL
            self.up, self.down = torch.nn.Linear(256, 1024, bias=False), torch.nn.Linear(1024, 256, bias=False)

        def forward(self, x):
            hidden = self.up(x)
            return {"loss": self.down(hidden).sum()}

    def inputs(model, num_samples, longest):
        return {"x": torch.zeros(num_samples, longest["tokens"], 256)}

    workload = Workload(mode="train", dtype="float32", optimizer_bytes=8.0)
    (row,) = simulate(Net(), workload, [(4, 128)], inputs=inputs)
    x, hidden, out, weight = 4 * 128 * 256 * 4, 4 * 128 * 1024 * 4, 4 * 128 * 256 * 4, 1024 * 256 * 4
    # In the backward pass: input, hidden, hidden's gradient and a fresh weight gradient are alive together.
    assert x + 2 * hidden + weight <= row.batch_bytes <= x + 2 * hidden + out + weight + 4096


def test_dropout_does_not_materialise_scores():
    """CUDA's fused kernels take dropout; the CPU's path would keep L x L scores per head."""
    config = models.gpt2(vocab=500, width=64, heads=8, dropout=0.1, n_positions=4096)
    short, long = batch_bytes(config, [(1, 1024), (1, 4096)], attention="flash", dtype="bfloat16")
    assert long / short == pytest.approx(4, rel=0.05)
    eager_short, eager_long = batch_bytes(config, [(1, 1024), (1, 4096)], attention="eager", dtype="bfloat16")
    assert eager_long / eager_short > 10


def test_a_padding_mask_costs_memory_of_its_own():
    masked, unmasked = (batch_bytes(SMALL, [(4, 1024)], attention=a, dtype="bfloat16")[0] for a in ("sdpa", "flash"))
    assert masked - unmasked >= 2 * 4 * 1024 * 1024 * 2  # one bias of two bytes a pair, in each of two layers


@pytest.mark.parametrize("known", [{}, {"autocast": "bfloat16"}, {"attention": "eager"}], ids=str)
def test_checkpointing_saves_memory(known):
    config = LlamaConfig(**{**SMALL.to_dict(), "num_hidden_layers": 8})
    (plain,) = batch_bytes(config, [(4, 256)], **known)
    (saved,) = batch_bytes(config, [(4, 256)], gradient_checkpointing=True, **known)
    assert saved < plain


def test_generation_grows_with_its_output():
    few, many = (batch_bytes(SMALL, [(8, 64)], "generate", max_new_tokens=t)[0] for t in (16, 1016))
    cache = 2 * 8 * 2 * 16 * 4 * 2  # keys and values, 8 samples, 2 heads of 16, float32, 2 layers: bytes a token
    assert many - few >= 900 * cache


def test_encoders_and_two_streams():
    bert = models.bert(vocab=500, width=64, heads=4, dropout=0.1)
    assert batch_bytes(bert, [(2, 64)])[0] > 0
    t5 = models.t5(vocab=500, width=64, heads=4, dropout=0.1, d_kv=16)
    short, long = batch_bytes(t5, [(2, {"tokens": 64, "target": 8}), (2, {"tokens": 64, "target": 64})])
    assert short < long


def test_the_users_model_stays_as_it_was():
    model = torch.nn.Linear(4, 4)
    model.config = SMALL
    with pytest.raises(ConfigError, match="cannot be simulated"):
        simulate(model, Workload(mode="train", dtype="float32"), [(2, 8)])
    assert model.weight.device.type == "cpu"
    assert model.weight.grad is None


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([], "`shapes` is empty"),
        ([(0, 8)], r"shapes\[0\]: `num_samples` must be a positive integer, but is 0"),
        ([(1, -8)], r"shapes\[0\]: `tokens` must be a positive integer, but is -8"),
        ([(1, 8), (1, {"target": 8})], r"shapes\[1\]: longest has streams \['target'\], but not 'tokens'"),
        ([(2**30, 2**30)], "no device holds that"),
        ([7], r"must be \(num_samples, longest\)"),
    ],
)
def test_absurd_shapes(shapes, message):
    with pytest.raises(ConfigError, match=message):
        simulate(SMALL, None, shapes)


def test_a_workload_that_contradicts_the_model():
    with pytest.raises(ConfigError, match="the workload says num_layers=7, but the model has 2"):
        simulate(SMALL, Workload.from_model(SMALL, trace=False).replace(num_layers=7), [(1, 8)])


def test_a_model_that_needs_values_is_named():
    class Peeks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config, self.scale = SMALL, torch.nn.Parameter(torch.ones(()))

        def forward(self, input_ids, **kwargs):
            return {"loss": self.scale * input_ids.sum().item()}

    with pytest.raises(ConfigError, match=r"needs more than shapes .*item.*measure\(\) on a device"):
        simulate(Peeks(), Workload(mode="train", dtype="float32"), [(1, 8)])


class Counters:
    """An allocator's counters that were written down before, on the CPU."""

    device = torch.device("cpu")

    def __init__(self, peaks):
        self._peaks = iter(peaks)

    def reset(self):
        pass

    def allocated(self):
        return 1000

    def peaks(self):
        return next(self._peaks), 9999


class Small(torch.nn.Module):
    def __init__(self, limit):
        super().__init__()
        self.config, self.scale, self.limit = SMALL, torch.nn.Parameter(torch.ones(())), limit

    def forward(self, input_ids, **kwargs):
        if input_ids.numel() > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return {"loss": self.scale * input_ids.float().sum()}


def test_running_out_of_memory_is_a_row_without_a_size():
    workload = Workload(mode="train", dtype="float32", optimizer_bytes=8.0)
    rows = measure(Small(100), workload, [(2, 8), (2, 800), (4, 8)], device=Counters([1500, 1700]))
    assert [(row.batch_bytes, row.oom) for row in rows] == [(500, False), (None, True), (700, False)]
    assert rows.source == "measured"
    assert rows.rows[0].static_bytes == 1000 + 8


def test_without_a_device_measure_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        measure(Small(100), Workload(mode="train"), [(1, 8)])
