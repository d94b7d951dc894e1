"""The simulator against what is known: hand counts, CUDA's kernel choices, and errors."""

import pytest
import torch

from dynagroup.errors import ConfigError
from dynagroup.memory import Workload, measure, simulate
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


def test_a_linear_model_without_surprises_is_counted_by_hand():
    def inputs(model, num_samples, longest):
        return {"x": torch.zeros(num_samples, longest["tokens"], 256)}

    (row,) = simulate(Net(), TRAIN, [(4, 128)], inputs=inputs)
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


def test_logits_that_the_loop_lets_go_are_not_there_in_the_backward_pass():
    wide = models.llama(vocab=50_000, width=64)
    kept, gone = (batch_bytes(wide, [(4, 128)], dtype="bf16", keeps_outputs=keeps)[0] for keeps in (None, False))
    assert kept - gone == pytest.approx(4 * 128 * 50_000 * 2, rel=0.01)


def test_generation_grows_with_its_output():
    few, many = (batch_bytes(SMALL, [(8, 64)], "generate", max_new_tokens=t)[0] for t in (16, 1016))
    cache = 2 * 8 * 2 * 16 * 4 * 2  # keys and values, 8 samples, 2 heads of 16, float32, 2 layers: bytes a token
    assert many - few >= 900 * cache


def test_what_cannot_be_simulated_is_named_and_the_users_model_stays_as_it_was():
    model = Net(limit=0)
    with pytest.raises(ConfigError, match=r"needs more than shapes .*measure\(\) on a device"):
        simulate(model, TRAIN, [(1, 8)])
    assert (model.scale.device.type, model.scale.grad) == ("cpu", None)


class Counters:
    """An allocator's counters that were written down before, on the CPU."""

    device = torch.device("cpu")

    def __init__(self, peaks):
        self._left = iter(peaks)

    def reset(self):
        pass

    def allocated(self):
        return 1000

    def peaks(self):
        return next(self._left), 9999


def test_running_out_of_memory_is_a_row_without_a_size():
    rows = measure(Net(limit=100), TRAIN, [(2, 8), (2, 800), (4, 8)], device=Counters([1500, 1700]))
    assert [(row.batch_bytes, row.oom) for row in rows] == [(500, False), (None, True), (700, False)]
    assert rows.source == "measured"
    assert rows.rows[0].static_bytes == 1000 + 8
