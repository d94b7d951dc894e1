"""The simulator, closed form, profile and regressor: hand counts, errors, monotone predictions; a survey of architectures."""

import hashlib
import json
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
import xgboost
from transformers.integrations import sdpa_attention

from dynagroup import ConfigError, MemoryBudget, StateError
from dynagroup.memory import MemoryRegressor, ProfiledMemory, TracedMemory, Workload
from dynagroup.memory.formula import closed_form
from dynagroup.memory.measurements import Measurement, Measurements, measure, simulate
from dynagroup.memory.phases import Phases
from dynagroup.shapes import BatchShape
from dynagroup.state import seal_of
from regressor import measure_gpu, report
from regressor.families import FAMILIES
from regressor.measure_gpu import DRY, DryDevice, measure_all
from regressor.measure_gpu import report as shown_of
from regressor.rows import load_groups
from regressor.train import Recipe, train
from tests import models

SMALL = models.llama(vocab=500, width=64, heads=4, num_key_value_heads=2)
TRAIN = Workload(mode="train", dtype="float32", optimizer_bytes=8.0)
FULL = Measurement(9, {"tokens": 4}, 0, None, oom=True)
SHARDS, LEAST = 12, 0.97
LIMIT_S = 400  # of a core for one architecture; most take three, BailingHybrid three hundred
SHAPES = [(8, 200), (3, 555), (30, 100)]
MAPPINGS = (
    hf.MODEL_FOR_CAUSAL_LM_MAPPING,
    hf.MODEL_FOR_MASKED_LM_MAPPING,
    hf.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)
KINDS = sorted({kind for mapping in MAPPINGS for kind in mapping}, key=lambda kind: kind.__name__)
HEADS_NAMES = (
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"
)
LAYER_NAMES = "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers"
INNER_NAMES = "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner"
SIZES = {
    512: ("vocab_size",),
    64: ("hidden_size", "d_model", "n_embd"),
    3: tuple(LAYER_NAMES.split()),
    4: (*HEADS_NAMES.split(), "num_experts", "num_local_experts", "n_routed_experts"),
    2: ("num_key_value_heads", "num_experts_per_tok", "eos_token_id"),
    16: ("head_dim",),
    0: ("pad_token_id",),
    128: tuple(INNER_NAMES.split()),
    1: ("bos_token_id",),
    32: ("moe_intermediate_size",),
    2048: ("max_position_embeddings",),
}
OF_ANY = {name: size for size, names in SIZES.items() for name in names}
HEADS = ("head_dim", "num_key_value_heads")
LEFT_OUT = ((), HEADS[:1], HEADS[1:], HEADS, {*OF_ANY} - {*SIZES[512], *SIZES[3]})
ROOT = Path(__file__).parent.parent.parent
DATA = ROOT / "regressor" / "data" / "simulated.parquet"
SHIPPED = ROOT / "dynagroup" / "memory" / "artifacts" / "pretrained.ubj"
KNOWN = Workload(
    mode="train",
    num_layers=24,
    num_encoder_layers=0,
    hidden_size=896,
    num_heads=14,
    num_kv_heads=2,
    head_size=64,
    intermediate_size=4864,
    experts_per_token=1,
    gated_mlp=True,
    dropout=False,
    vocabulary_size=151936,
    lm_head=True,
    encoder_decoder=False,
    fixed_tokens=0,
    num_parameters=494032768,
    trainable_share=1.0,
    dtype="bfloat16",
    attention="sdpa",
    score_bias=False,
    gradient_checkpointing=False,
    optimizer_bytes=4.0,
    max_new_tokens=0,
)
WORKLOADS = {
    "unknown": Workload(),
    "train": KNOWN,
    "eager": KNOWN.replace(attention="eager", gradient_checkpointing=True),
    "generate": KNOWN.replace(
        mode="generate", max_new_tokens=256, trainable_share=0.0, optimizer_bytes=0.0
    ),
    "mode": Workload(mode="generate"),
    "strange": KNOWN.replace(hidden_size=20480, num_heads=320, num_layers=200),
}


def batch_bytes(config, shapes, mode="train", **known):
    rows = simulate(config, Workload.from_model(config, mode, trace=False, **known), shapes)
    return [row.batch_bytes for row in rows]


class Net(torch.nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SMALL
        self.up = torch.nn.Linear(256, 1024, bias=False)
        self.down = torch.nn.Linear(1024, 256, bias=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.down(self.up(x)).sum()}


class Repeated(Net):
    """Runs its second layer so many times."""

    times = 1

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = self.up(x)
        return {"loss": sum(self.down(hidden).sum() for _ in range(self.times))}


class CastBefore(Net):
    """Runs its layers without gradients, then with them."""

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        with torch.no_grad():
            hidden = self.down(self.up(x))
        return super().forward(x + hidden)


def rows_of_hidden_states(model: Any, num_samples: int, longest: Any) -> dict[str, torch.Tensor]:
    return {"x": torch.zeros(num_samples, longest["tokens"], 256)}


def bytes_of_net(model: Net, shape: tuple[int, int], workload: Workload) -> Any:
    [row] = simulate(model, workload, [shape], inputs=rows_of_hidden_states)
    return row.batch_bytes


AUTOCAST = TRAIN.replace(autocast="bfloat16")


def test_autocast_casts_a_weight_once_a_forward_pass():
    twice = Repeated()
    twice.times = 2
    often = Repeated()
    often.times = 20
    further = bytes_of_net(often, (1, 1), AUTOCAST) - bytes_of_net(twice, (1, 1), AUTOCAST)
    assert further < 2 * 2 * 1024 * 256  # not as much as two further copies


def test_weights_that_were_cast_without_gradients_are_cast_again_where_gradients_are_needed():
    """Inputs are kept for the gradients of weights, too."""
    before = bytes_of_net(CastBefore(), (4, 128), AUTOCAST)
    assert before >= bytes_of_net(Net(), (4, 128), AUTOCAST)


def test_a_linear_model_is_counted_by_hand():
    """In the backward pass: input, hidden, hidden's gradient and a fresh weight gradient are alive together."""
    size = bytes_of_net(Net(), (4, 128), TRAIN)
    x = 4 * 128 * 256 * 4
    hidden = 4 * 128 * 1024 * 4
    weight = 1024 * 256 * 4
    alive = x + 2 * hidden + weight
    assert alive <= size <= alive + x + 4096  # the output is as large as the input


def growth_with_length(attention: str) -> float:
    """Of a batch of one sample, from 1,024 to 4,096 tokens."""
    config = models.gpt2(vocab=500, width=64, heads=8, dropout=0.1, n_positions=4096)
    short, long = batch_bytes(config, [(1, 1024), (1, 4096)], attention=attention, dtype="bfloat16")
    return long / short


def test_dropout_without_scores_grows_with_the_length_and_with_them_with_its_square():
    assert growth_with_length("flash") == pytest.approx(4, rel=0.05)
    assert growth_with_length("eager") > 10


def bytes_of_one(config: Any, shape: tuple[int, int], mode: Any = "train", **known: Any) -> Any:
    [size] = batch_bytes(config, [shape], mode, **known)
    return size


def test_a_mask_costs_a_bias_of_two_bytes_a_pair_in_each_layer():
    masked = bytes_of_one(SMALL, (4, 1024), attention="sdpa", dtype="bfloat16")
    unmasked = bytes_of_one(SMALL, (4, 1024), attention="flash", dtype="bfloat16")
    assert masked - unmasked >= 2 * 4 * 1024 * 1024 * 2


def test_outputs_that_are_kept_cost_their_logits():
    wide = models.llama(vocab=50_000, width=64)
    kept = bytes_of_one(wide, (4, 128), dtype="bf16")
    gone = bytes_of_one(wide, (4, 128), dtype="bf16", keeps_outputs=False)
    assert kept - gone == pytest.approx(4 * 128 * 50_000 * 2, rel=0.01)


def test_one_key_head_stores_its_scores():
    """No fused kernel takes it."""
    falcon = models.config(hf.FalconConfig, width=64, heads=8)
    size = bytes_of_one(falcon, (2, 1024), "forward", attention="sdpa")
    assert size > 2 * 8 * 1024 * 1024 * 4


@pytest.mark.parametrize(
    ("dtype", "head_size", "stores"),
    [
        ("float32", 26, True),
        ("float32", 28, False),
        ("bfloat16", 28, True),
        ("bfloat16", 24, False),
    ],
)
def test_heads_of_odd_sizes_store_their_scores(dtype, head_size, stores):
    """As TinyBERT: 26. Of two samples and two heads, in float32."""
    bert = models.bert(
        vocab=64, width=2 * head_size, inner=64, layers=1, heads=2, max_position_embeddings=1024
    )
    scores = 2 * 2 * 1024 * 1024 * 4
    assert (bytes_of_one(bert, (2, 1024), "forward", dtype=dtype) > scores) == stores


def test_generation_keeps_a_cache():
    """Tokens, keys and values, samples, heads of 16, float32, layers."""
    few = bytes_of_one(SMALL, (8, 64), "generate", max_new_tokens=16)
    many = bytes_of_one(SMALL, (8, 64), "generate", max_new_tokens=1016)
    assert many - few >= 900 * 2 * 8 * 2 * 16 * 4 * 2


def test_generation_keeps_a_steps_logits_while_the_cache_grows():
    few = models.llama(vocab=100, width=64, layers=3)
    many = models.llama(vocab=3100, width=64, layers=3)
    further = bytes_of_one(many, (4, 8), "generate", max_new_tokens=2000)
    further -= bytes_of_one(few, (4, 8), "generate", max_new_tokens=2000)
    assert further == pytest.approx(4 * 3000 * 4, rel=0.01)


# Peaks of a GPU


def measured_rows(name: str) -> list[dict[str, Any]]:
    results = ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(results.read_text())["figures"]["rows"]


def measured_bytes(model: str, mode: str, shape: tuple[int, int]) -> int:
    for row in measured_rows("gpu_memory"):
        row_shape = (row["num_samples"], row["longest_tokens"])
        if (row["model"], row["mode"], row_shape) == (model, mode, shape):
            return row["batch_bytes"]
    raise LookupError(f"{model}, {mode}, {shape} was not measured")


@pytest.mark.parametrize(
    ("model", "mode", "shape"),
    [
        ("bert", "train", (2, 2048)),
        ("t5", "train", (2, 512)),
        ("t5", "generate", (4, 1024)),
        ("bart", "train", (2, 512)),
    ],
)
def test_peaks_are_those_of_an_h100(model, mode, shape, monkeypatch):
    """With transformers 5.17, T5's biases lie in another order, so no fused kernel takes them, and all scores are stored."""

    def older(bias, mask, is_causal, query, key):
        if mask is None and not (is_causal and query.shape[2] > 1):
            return bias
        below = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()[None, None]
        return torch.where(below if mask is None else mask, bias, torch.finfo(query.dtype).min)

    monkeypatch.setattr(sdpa_attention, "create_position_bias_mask", older)
    family = FAMILIES[model]
    config = family.build(family.known)
    max_new_tokens = 64 if mode == "generate" else 0
    size = bytes_of_one(config, shape, mode, dtype="bfloat16", max_new_tokens=max_new_tokens)
    assert size == pytest.approx(measured_bytes(model, mode, shape), rel=0.021)


SIZES_OF_PACKED = {"vocab": 32768, "width": 1024, "inner": 4096, "layers": 8}
PACKED_CONFIGS = {
    "llama": models.llama(**SIZES_OF_PACKED, heads=16, num_key_value_heads=4),
    "gemma2": models.config(
        hf.Gemma2Config,
        **SIZES_OF_PACKED,
        heads=8,
        num_key_value_heads=4,
        head_dim=128,
        sliding_window=1024,
    ),
}


@pytest.mark.parametrize("model", PACKED_CONFIGS)
def test_packed_peaks_with_stored_scores_are_those_of_an_h100(model):
    """The backward pass of a softmax holds its result and as much again; Gemma 2 has a mask for each way to attend."""
    of_model = [row for row in measured_rows("gpu_packed") if row["model"] == model]
    rows = [row for row in of_model if (row["attention"], row["num_samples"]) == ("eager", 8)]
    assert rows
    for row in rows:
        size = bytes_of_one(
            PACKED_CONFIGS[model], (8, 512), dtype="bfloat16", attention="eager", layout="packed"
        )
        assert size == pytest.approx(row["batch_bytes"], rel=0.005)


@pytest.mark.parametrize(("attention", "size"), [("sdpa", 1), ("eager", 2)])
def test_packed_layers_that_attend_in_two_ways_hold_two_masks(attention, size):
    """And another kind of rotary embeddings."""

    def bytes_of_kinds(kinds: list[str]) -> int:
        config = models.config(
            hf.Gemma3TextConfig,
            width=64,
            inner=64,
            layers=4,
            num_key_value_heads=1,
            head_dim=16,
            layer_types=kinds,
        )
        return bytes_of_one(
            config, (8, 128), dtype="bfloat16", attention=attention, layout="packed"
        )

    both = bytes_of_kinds(["sliding_attention", "full_attention"] * 2)
    further = both - bytes_of_kinds(["full_attention"] * 4)
    assert further == pytest.approx(size * (8 * 128) ** 2, rel=0.07)


# Measured rows


class Scaled(torch.nn.Module):
    """One parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SMALL
        self.scale = torch.nn.Parameter(torch.ones(()))


class AsksForAValue(Scaled):
    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.scale * input_ids.sum().item()}


class RunsOutOfMemory(Scaled):
    """Beyond 100 tokens."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        if input_ids.numel() > 100:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return {"loss": self.scale * input_ids.float().sum()}


def test_what_cannot_be_simulated_is_named():
    model = AsksForAValue()
    with pytest.raises(ConfigError, match=r"cannot run without data .*measure\(\) on a device"):
        simulate(model, TRAIN, [(1, 8)])
    assert model.scale.device.type == "cpu"
    assert model.scale.grad is None


def test_running_out_of_memory_is_a_row_without_a_size():
    device = Counters(1500, 1700)
    rows = measure(RunsOutOfMemory(), TRAIN, [(2, 8), (2, 800), (4, 8)], device=device)
    assert [row.batch_bytes for row in rows] == [500, None, 700]
    assert [row.oom for row in rows] == [False, True, False]
    assert rows.source == "measured"
    assert rows.rows[0].static_bytes == 1000 + 8


class Counters:
    """An allocator's counters that were written down before, on the CPU."""

    device = torch.device("cpu")

    def __init__(self, *peaks: int) -> None:
        self._left = iter(peaks)

    def reset(self) -> None:
        pass

    def allocated(self) -> int:
        return 1000

    def peaks(self) -> tuple[int, int]:
        return next(self._left), 9999


@pytest.mark.filterwarnings(
    "ignore:.*pad_token_id.*", "ignore:Passing a tuple of `past_key_values`"
)
def test_what_fails_or_has_no_time_left_is_written_down_and_the_others_are_measured(
    tmp_path, monkeypatch, capsys
):
    build = measure_gpu.as_random_model
    times = iter([0.0] * 5 + [9e9])

    def fails_for_gpt2(config, workload, device):
        if config.model_type == "gpt2":
            raise RuntimeError("no kernel")
        return build(config, workload, device)

    monkeypatch.setattr(measure_gpu, "as_random_model", fails_for_gpt2)
    names = ["gpt2", "qwen2", "bert"]
    rows, about = measure_all(names, DRY, DryDevice(), tmp_path / "d", 25, lambda: next(times))
    assert about["failed"] == {"gpt2": "RuntimeError: no kernel"}
    assert about["left_out"] == ["bert"]
    assert {row["model"] for row in rows} == {"qwen2"}
    assert {row["mode"] for row in rows} == {"train", "generate"}
    for row in rows:
        assert row["error"] == row["simulated_peak_bytes"] / row["peak_bytes"] - 1
    full = {**rows[0], "peak_bytes": None, "reserved_bytes": None, "error": None, "oom": True}
    shown = shown_of([{**rows[0], "error": 0.06}, full])
    assert "out of memory" in shown
    assert "1 of 2 shapes measured; further off than 5%: qwen2 train (1)" in shown


def smaller(kind: Any) -> Iterator[Any]:
    """Configs of a model with fewer and smaller layers that can be built: small in all sizes first, at last in few."""
    for depth, left_out in (*product((3, 8), LEFT_OUT), (3, OF_ANY)):
        sizes = {**OF_ANY, **dict.fromkeys(SIZES[3], depth)}
        with suppress(Exception):  # whatever the architecture's own code raises: other sizes may do
            names = (sizes.keys() & kind().to_dict().keys()) - set(left_out)
            config = kind(**{name: sizes[name] for name in names})
            with torch.device("meta"):
                hf.AutoModel.from_config(config)
            yield config


def shares(config: Any, mode: str) -> list[float] | None:
    """Prediction over simulation of each shape; None where it is refused."""
    try:
        memory = TracedMemory.of(config, mode, dtype="bfloat16")
        rows = simulate(config, memory.workload, SHAPES)
    except ConfigError:
        return None
    result = []
    for row in rows:
        [predicted] = memory.batch_bytes(BatchShape.of(row.num_samples, dict(row.longest)))
        result.append(float(predicted) / row.batch_bytes)
    return result


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
    shares_of = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in KINDS[shard::SHARDS]:
            timed()
            tried = (shares(config, mode) for config in smaller(kind))
            first = next((values for values in tried if values is not None), None)
            if first is not None:
                shares_of[kind.__name__] = first
    too_small = {name: values for name, values in shares_of.items() if min(values) < LEAST}
    assert too_small == {}
    assert len(shares_of) > len(KINDS) / SHARDS / 2


# The regressor


@pytest.mark.parametrize("name", ["train", "eager", "generate", "strange"])
def test_shares_of_a_formula_are_shares(name):
    regressor = MemoryRegressor.pretrained(WORKLOADS[name])
    assert regressor.sharp
    form = closed_form(WORKLOADS[name], regressor.card["constants"])
    assert np.min(form.phases.rows) >= 0
    constant, quadratic = form.shares(BatchShape.of(4, 100))
    assert 0 <= constant + quadratic <= 1


@pytest.mark.parametrize("name", WORKLOADS)
def test_shipped_artifact_is_monotone_on_a_dense_grid(name):
    regressor = MemoryRegressor.pretrained(WORKLOADS[name])
    counts = np.unique(np.geomspace(1, 4096, 30).astype(int))
    lengths = np.unique(np.geomspace(4, 16384, 30).astype(int))
    mesh_counts, mesh_lengths = np.meshgrid(counts, lengths, indexing="ij")
    grid = BatchShape.of(mesh_counts.ravel(), mesh_lengths.ravel())
    for baseline in (BatchShape.of(1, 64), BatchShape.of(16, 2048), BatchShape.of(512, 128)):
        ratio = regressor.relative(grid, baseline).reshape(mesh_counts.shape)
        assert (np.diff(ratio, axis=0) >= -1e-9 * ratio[1:]).all()
        assert (np.diff(ratio, axis=1) >= -1e-9 * ratio[:, 1:]).all()


@pytest.mark.parametrize("name", WORKLOADS)
def test_budgets_say_what_the_artifact_says(name):
    budget = MemoryBudget(16, longest=2048, model=MemoryRegressor.pretrained(WORKLOADS[name]))
    lengths = np.unique(np.geomspace(1, 4096, 12).astype(np.int64))
    most = budget.largest(lengths)
    assert budget.fits(BatchShape.of(np.maximum(most, 1), lengths))[most > 0].all()
    assert not budget.fits(BatchShape.of(most + 1, lengths)).any()
    assert (most[lengths <= 2048] >= 16).all()


def test_batch_size_alone_is_enough_and_knowing_more_is_bolder():
    """Nothing known must allow for generation; training known need not."""
    budget = MemoryBudget(32).bind({"tokens": np.array([10, 500], np.int32)})
    short, long = budget.largest(np.array([50, 500])).tolist()
    assert long >= 32
    training = MemoryRegressor.pretrained(Workload(mode="train"))
    [bolder] = MemoryBudget(32, longest=500, model=training).largest(np.array([50]))
    assert 48 < short < bolder


def test_a_first_batch_of_pairs_is_known_by_both_lengths():
    training = MemoryRegressor.pretrained(Workload(mode="train"))
    pairs = MemoryBudget(8, longest={"tokens": 1280, "target": 640}, model=training)
    shape = BatchShape.of([8, 9, 16], {"tokens": [1280, 1280, 8], "target": [640, 640, 4]})
    assert pairs.fits(shape).tolist() == [True, False, True]


class Counting(MemoryRegressor):
    calls = 0

    def relative(self, shape, baseline, /):
        type(self).calls += 1
        return super().relative(shape, baseline)


def test_the_regressor_is_asked_once():
    shipped = MemoryRegressor.pretrained()
    budget = MemoryBudget(8, longest=512, model=Counting(shipped.trees, shipped.card))
    budget.fits(BatchShape.of([1, 9], 100))
    num_calls = Counting.calls
    for length in range(1, 512):
        budget.fits(BatchShape.of([8, 16, 32], length))
    assert Counting.calls == num_calls


GRID = tuple(product((1, 2, 4, 8), (64, 128, 512, 1024)))


def rows(form: Any, shapes: Any = GRID) -> tuple[Measurement, ...]:
    """As if a device needed ``form(samples, length)`` bytes."""
    result = []
    for num_samples, length in shapes:
        size = int(form(num_samples, length))
        result.append(Measurement(num_samples, {"tokens": length}, 1000, size))
    return tuple(result)


def three_phases(n, length):
    return max(1e6 + 50 * n * length, 900 * n * length, 300 * n * length + 2 * n * length**2)


@pytest.fixture(scope="module")
def profile() -> ProfiledMemory:
    return ProfiledMemory.fit(Measurements(rows(three_phases), Workload()))


@pytest.mark.parametrize(("num_samples", "length"), [(3, 100), (16, 2048), (1, 16)])
@pytest.mark.filterwarnings("ignore:.*but a batch has one of")
def test_a_profile_finds_the_phases(profile, num_samples, length):
    [size] = profile.batch_bytes(BatchShape.of(num_samples, length))
    assert size == pytest.approx(three_phases(num_samples, length), rel=0.05)
    assert profile.error < 0.02


def test_a_profile_says_once_when_it_guesses():
    profile = ProfiledMemory.fit(Measurements(rows(three_phases), Workload()))
    with pytest.warns(UserWarning, match="up to 1024 tokens, but a batch has one of 4096"):
        profile.batch_bytes(BatchShape.of(1, 4096))
    profile.batch_bytes(BatchShape.of(1, 4096))


@pytest.mark.parametrize(
    ("size", "oom"),
    [(float("nan"), False), (-1, False), (float("inf"), False), (5, True)],
)
def test_absurd_measurements_name_their_row(size, oom):
    row = Measurement(1, {"tokens": 4}, 0, size, oom)
    message = "row 0: sizes must be finite and at least 0, and `batch_bytes` None"
    with pytest.raises(ConfigError, match=message):
        Measurements((row,), Workload())


def pairs_of_tokens(n, length):
    return n * length


def test_measurements_without_a_size_do_not_count():
    three = rows(pairs_of_tokens, [(1, 8), (2, 8), (3, 8)])
    few = Measurements((*three, FULL), Workload(mode="train"))
    with pytest.raises(ConfigError, match="at least 4 rows"):
        ProfiledMemory.fit(few)
    with pytest.raises(ConfigError, match="at least 8 rows"):
        MemoryRegressor.fit(few)


def test_measurements_survive_parquet(tmp_path):
    kept = Measurements((*rows(pairs_of_tokens), FULL), KNOWN, "measured", {"gpu": "x"})
    kept.to_parquet(tmp_path / "rows.parquet")
    assert Measurements.from_parquet(tmp_path / "rows.parquet") == kept


def truth(n, length):
    return 1e7 + 900 * n * length + n * length**2


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    regressor = MemoryRegressor.fit(Measurements(rows(truth), KNOWN))
    path = tmp_path_factory.mktemp("artifact") / "mine.ubj"
    regressor.save(path)
    return regressor, path


def test_a_regressor_learns_a_workload_of_your_own(fitted):
    regressor, _ = fitted
    shapes = BatchShape.of([8, 4, 2], [512, 1024, 128])
    sizes = np.array([truth(8, 512), truth(4, 1024), truth(2, 128)])
    ratio = regressor.relative(shapes, BatchShape.of(8, 1024))
    assert ratio == pytest.approx(sizes / truth(8, 1024), abs=0.1)
    assert "traced" not in str(regressor)


def test_a_regressor_says_the_same_after_loading(fitted):
    regressor, path = fitted
    again = MemoryRegressor.load(path)
    shapes = BatchShape.of([8, 4, 2], [512, 1024, 128])
    baseline = BatchShape.of(8, 1024)
    assert (again.relative(shapes, baseline) == regressor.relative(shapes, baseline)).all()
    assert again.workload == KNOWN
    assert again.fingerprint == regressor.fingerprint


def test_regressors_of_other_rows_have_another_fingerprint(fitted):
    regressor, _ = fitted
    larger = rows(lambda n, length: 2 * truth(n, length) + n**2)
    other = MemoryRegressor.fit(Measurements(larger, KNOWN))
    assert other.fingerprint != regressor.fingerprint


NONE: Any = [0.0] * 6
CONSTANT: Any = (5000.0, 0, 0, 0, 0, 0, *NONE)
ALIGNED = Phases(((0, 0, 0, 90, 0, 0.7, *NONE),))
PADDED = Phases((CONSTANT, (0, 0, 0, 100, 0, 1, *NONE)), aligned=ALIGNED)


def above_the_trace(n, length):
    return max(5000, 100 * n * length + n * length**2) + 40_000


@pytest.fixture(scope="module")
def fitted_to_a_trace() -> MemoryRegressor:
    measured = rows(above_the_trace, product((1, 3, 20), (16, 100, 900)))
    return MemoryRegressor.fit(Measurements(measured, Workload(mode="train", phases=PADDED)))


@pytest.mark.parametrize(
    ("length", "phases"), [(912, ALIGNED), (900, PADDED)], ids=["aligned", "padded"]
)
def test_fitted_to_a_traced_workload_it_only_raises_the_trace(fitted_to_a_trace, length, phases):
    unseen = BatchShape.of([1, 2, 30], [50, 700, 300])
    first = BatchShape.of(20, length)
    ratio = fitted_to_a_trace.relative(unseen, first)
    traced = PADDED.bytes(unseen) / phases.bytes(first)
    assert (ratio >= traced * (1 - 1e-6)).all()
    if phases is PADDED:
        assert ratio[0] > 1.2 * traced[0]  # the constant weighs on small batches
    assert "is traced (" in str(fitted_to_a_trace)


def edit(path, sealed=True, **changes):
    """Change the card, and seal it as if it had been saved so."""
    card = path.with_suffix(".json")
    changed = {**json.loads(card.read_text()), **changes}
    card.write_text(json.dumps({**changed, "seal": seal_of(changed)} if sealed else changed))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda p: p.write_bytes(p.read_bytes()[:-9] + b"123456789"),
            "not match the JSON file beside it in hashes",
        ),
        (lambda p: p.with_suffix(".json").write_text("{"), "is damaged"),
        (lambda p: edit(p, features=["other"]), "beside it in features"),
        (lambda p: edit(p, format=99), "beside it in format"),
        (lambda p: edit(p, sealed=False, constants={"keep_hidden": 0.1}), "beside it in seal"),
    ],
)
def test_damaged_artifacts_are_refused(fitted, tmp_path, damage, message):
    for file in (fitted[1], fitted[1].with_suffix(".json")):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    damage(tmp_path / "mine.ubj")
    with pytest.raises(StateError, match=message):
        MemoryRegressor.load(tmp_path / "mine.ubj")


def test_xgboost_is_needed_for_trees_alone():
    code = """
import sys
for name in ("xgboost", "scipy", "datasets", "pyarrow", "matplotlib", "pandas"):
    sys.modules[name] = None
import regressor.measure_gpu
from dynagroup import LengthAwareBatchSampler, MemoryBudget, TokenBudget
from dynagroup.errors import ConfigError
from dynagroup.memory import MemoryRegressor, Workload
from dynagroup.shapes import BatchShape
for budget in (TokenBudget(200), 200, MemoryBudget(2)):
    assert len(LengthAwareBatchSampler([3, 9, 4, 100], budget, rank=0, world_size=1)) >= 1
try:
    MemoryRegressor.pretrained(Workload.from_json(sys.argv[1])).relative(BatchShape.of(2, 8), BatchShape.of(4, 8))
except ConfigError as error:
    assert "pip install dynagroup[memory]" in str(error)
else:
    raise AssertionError("trees were asked without xgboost")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, KNOWN.to_json()], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_outside_the_trained_range_it_is_careful_and_says_so_once():
    regressor = MemoryRegressor.pretrained(WORKLOADS["strange"])
    with pytest.warns(UserWarning, match="not trained on models or batches"):
        ratio = regressor.relative(BatchShape.of([8, 16], 512), BatchShape.of(8, 512))
    assert ratio[1] >= 1.9
    regressor.relative(BatchShape.of([8, 16], 512), BatchShape.of(8, 512))


def dump_of(trees: bytes) -> list[str]:
    return xgboost.Booster(model_file=bytearray(trees)).get_dump()


def test_data_figures_and_report_belong_to_the_artifact_and_give_its_first_trees():
    """All its trees: below."""
    card = MemoryRegressor.pretrained().card
    result = json.loads(report.RESULTS.read_text())
    assert card["data_sha256"] == hashlib.sha256(DATA.read_bytes()).hexdigest()
    assert result["data_sha256"] == card["data_sha256"]
    assert card["recipe"] == result["recipe"]
    assert report.REPORT.read_text() == report.write(result)
    few = Recipe(trees=replace(Recipe().trees, rounds=20))
    again = train(load_groups(DATA), few, constants=card["constants"])
    assert dump_of(again.trees) == dump_of(SHIPPED.read_bytes())[:20]
    card_again = json.loads(json.dumps(again.card))
    del card_again["hashes"]
    assert {name: card.get(name) for name in card_again} == card_again


@pytest.mark.slow  # half a minute, nearly all of it for the constants
def test_the_committed_data_gives_the_artifact_bit_for_bit(tmp_path):
    again = tmp_path / "pretrained.ubj"
    command = [sys.executable, "-m", "regressor.train", "--no-evaluation", "--artifact", str(again)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert again.read_bytes() == SHIPPED.read_bytes()
    assert again.with_suffix(".json").read_text() == SHIPPED.with_suffix(".json").read_text()


def test_the_trees_of_a_regressor_are_read_once(monkeypatch):
    boosters = []
    booster = xgboost.Booster

    def noted(*args: Any, **options: Any) -> Any:
        boosters.append(booster(*args, **options))
        return boosters[-1]

    monkeypatch.setattr(xgboost, "Booster", noted)
    for _ in range(3):
        regressor = MemoryRegressor.pretrained(KNOWN)
        regressor.relative(BatchShape.of(8, 100), BatchShape.of(4, 256))
    assert len(boosters) <= 1
