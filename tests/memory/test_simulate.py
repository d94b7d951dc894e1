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
SIZES = {
    512: ("vocab_size",),
    64: ("hidden_size", "d_model", "n_embd"),
    3: (
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "encoder_layers",
        "decoder_layers",
    ),
    4: (
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "encoder_attention_heads",
        "decoder_attention_heads",
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
    ),
    2: ("num_key_value_heads", "num_experts_per_tok", "eos_token_id"),
    16: ("head_dim",),
    0: ("pad_token_id",),
    128: ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner"),
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
    """Two linear layers; or, with ``limit``, a model that runs out of memory beyond so many tokens, or asks for a value."""

    def __init__(self, limit=None):
        super().__init__()
        self.config, self.limit, self.scale = SMALL, limit, torch.nn.Parameter(torch.ones(()))
        if limit is None:
            self.up, self.down = (
                torch.nn.Linear(256, 1024, bias=False),
                torch.nn.Linear(1024, 256, bias=False),
            )

    def forward(self, input_ids=None, x=None, **kwargs):
        if self.limit is None:
            return {"loss": self.down(self.up(x)).sum()}
        if self.limit and input_ids.numel() > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return {
            "loss": self.scale * (input_ids.float().sum() if self.limit else input_ids.sum().item())
        }


def test_autocast_casts_a_weight_once_a_forward_pass():
    class Again(Net):
        def forward(self, input_ids=None, x=None, **kwargs):
            hidden = self.up(x)
            return {"loss": sum(self.down(hidden).sum() for _ in range(self.times))}

    def bytes_of(times):
        (model := Again()).times = times
        inputs = lambda *_: {"x": torch.zeros(1, 1, 256)}  # noqa: E731
        return (
            simulate(model, TRAIN.replace(autocast="bfloat16"), [(1, 1)], inputs=inputs)
            .rows[0]
            .batch_bytes
        )

    assert bytes_of(20) - bytes_of(2) < 2 * 2 * 1024 * 256  # not as much as two further copies


def test_weights_that_were_cast_without_gradients_are_cast_again_where_gradients_are_needed():
    class Recurrent(Net):
        def forward(self, input_ids=None, x=None, **kwargs):
            with torch.no_grad():
                hidden = self.down(self.up(x)) if self.times > 1 else x
            return {"loss": self.down(self.up(x + hidden)).sum()}

    def bytes_of(times):
        (model := Recurrent()).times = times
        inputs = lambda _, n, longest: {"x": torch.zeros(n, longest["tokens"], 256)}  # noqa: E731
        return (
            simulate(model, TRAIN.replace(autocast="bfloat16"), [(4, 128)], inputs=inputs)
            .rows[0]
            .batch_bytes
        )

    assert bytes_of(2) >= bytes_of(1)  # inputs are kept for the gradients of weights, too


def test_a_linear_model_and_dropout_without_scores_are_counted_by_hand():
    def inputs(model, num_samples, longest):
        return {"x": torch.zeros(num_samples, longest["tokens"], 256)}

    (row,) = simulate(Net(), TRAIN, [(4, 128)], inputs=inputs)
    x, hidden, out, weight = (
        4 * 128 * 256 * 4,
        4 * 128 * 1024 * 4,
        4 * 128 * 256 * 4,
        1024 * 256 * 4,
    )
    # In the backward pass: input, hidden, hidden's gradient and a fresh weight gradient are alive together.
    assert x + 2 * hidden + weight <= row.batch_bytes <= x + 2 * hidden + out + weight + 4096
    config = models.gpt2(vocab=500, width=64, heads=8, dropout=0.1, n_positions=4096)
    short, long = batch_bytes(config, [(1, 1024), (1, 4096)], attention="flash", dtype="bfloat16")
    assert long / short == pytest.approx(4, rel=0.05)
    eager_short, eager_long = batch_bytes(
        config, [(1, 1024), (1, 4096)], attention="eager", dtype="bfloat16"
    )
    assert eager_long / eager_short > 10


def test_what_masks_logits_and_caches_cost():
    masked, unmasked = (
        batch_bytes(SMALL, [(4, 1024)], attention=a, dtype="bfloat16")[0] for a in ("sdpa", "flash")
    )
    assert (
        masked - unmasked >= 2 * 4 * 1024 * 1024 * 2
    )  # one bias of two bytes a pair, in each of two layers
    wide = models.llama(vocab=50_000, width=64)
    kept, gone = (
        batch_bytes(wide, [(4, 128)], dtype="bf16", keeps_outputs=keeps)[0]
        for keeps in (None, False)
    )
    assert kept - gone == pytest.approx(4 * 128 * 50_000 * 2, rel=0.01)
    falcon = models.config(
        hf.FalconConfig, width=64, heads=8
    )  # one key head: no fused kernel takes it, scores are stored
    assert (
        batch_bytes(falcon, [(2, 1024)], "forward", attention="sdpa")[0] > 2 * 8 * 1024 * 1024 * 4
    )
    for dtype, size, stores in (
        ("float32", 26, True),
        ("float32", 28, False),
        ("bfloat16", 28, True),
        ("bfloat16", 24, False),
    ):
        bert = models.bert(
            vocab=64, width=2 * size, inner=64, layers=1, heads=2, max_position_embeddings=1024
        )  # as TinyBERT: 26
        scores = 2 * 2 * 1024 * 1024 * 4  # of two samples and two heads, in float32
        assert (batch_bytes(bert, [(2, 1024)], "forward", dtype=dtype)[0] > scores) == stores, (
            dtype,
            size,
        )
    few, many = (batch_bytes(SMALL, [(8, 64)], "generate", max_new_tokens=t)[0] for t in (16, 1016))
    assert (
        many - few >= 900 * 2 * 8 * 2 * 16 * 4 * 2
    )  # tokens, keys and values, samples, heads of 16, float32, layers
    sizes = (models.llama(vocab=words, width=64, layers=3) for words in (100, 3100))
    few, many = (
        batch_bytes(config, [(4, 8)], "generate", max_new_tokens=2000)[0] for config in sizes
    )
    assert many - few == pytest.approx(
        4 * 3000 * 4, rel=0.01
    )  # generate() keeps a step's logits while the cache grows


def measured_rows(name: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["figures"][
        "rows"
    ]


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
    row = next(
        row
        for row in measured_rows("gpu_memory")
        if (row["model"], row["mode"], row["num_samples"], row["longest_tokens"])
        == (model, mode, *shape)
    )
    family = FAMILIES[model]
    found = batch_bytes(
        family.build(family.known),
        [shape],
        mode,
        dtype="bfloat16",
        max_new_tokens=64 * (mode == "generate"),
    )
    assert found[0] == pytest.approx(row["batch_bytes"], rel=0.021)


def test_packed_peaks_with_stored_scores_are_those_of_an_h100():
    """The backward pass of a softmax holds its result and as much again; Gemma 2 has a mask for each way to attend."""
    sizes = {
        "vocab_size": 32768,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
    }
    configs = {
        "llama": hf.LlamaConfig(**sizes, num_attention_heads=16, num_key_value_heads=4),
        "gemma2": hf.Gemma2Config(
            **sizes, num_attention_heads=8, num_key_value_heads=4, head_dim=128, sliding_window=1024
        ),
    }
    rows = [
        row
        for row in measured_rows("gpu_packed")
        if row["attention"] == "eager" and row["num_samples"] == 8
    ]
    for row in (row for row in rows if row["model"] in configs):
        packed = {"dtype": "bfloat16", "attention": "eager", "layout": "packed"}
        found = batch_bytes(configs[row["model"]], [(8, 512)], **packed)
        assert found[0] == pytest.approx(row["batch_bytes"], rel=0.005), row["model"]


@pytest.mark.parametrize(("attention", "size"), [("sdpa", 1), ("eager", 2)])
def test_packed_layers_that_attend_in_two_ways_hold_two_masks(attention, size):
    def held(kinds):
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "vocab_size": 64,
        }
        config = hf.Gemma3TextConfig(
            **sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=16, layer_types=kinds
        )
        return batch_bytes(
            config, [(8, 128)], dtype="bfloat16", attention=attention, layout="packed"
        )[0]

    both = held(["sliding_attention", "full_attention"] * 2)
    further = both - held(["full_attention"] * 4)
    assert further == pytest.approx(
        size * (8 * 128) ** 2, rel=0.07
    )  # and another kind of rotary embeddings


def test_what_cannot_be_simulated_is_named_and_running_out_of_memory_is_a_row_without_a_size():
    model = Net(limit=0)
    with pytest.raises(ConfigError, match=r"cannot run without data .*measure\(\) on a device"):
        simulate(model, TRAIN, [(1, 8)])
    assert (model.scale.device.type, model.scale.grad) == ("cpu", None)
    rows = measure(Net(limit=100), TRAIN, [(2, 8), (2, 800), (4, 8)], device=Counters(1500, 1700))
    assert [(row.batch_bytes, row.oom) for row in rows] == [
        (500, False),
        (None, True),
        (700, False),
    ]
    assert rows.source == "measured"
    assert rows.rows[0].static_bytes == 1000 + 8


class Counters:
    """An allocator's counters that were written down before, on the CPU."""

    device, reset, allocated = (
        torch.device("cpu"),
        staticmethod(lambda: None),
        staticmethod(lambda: 1000),
    )

    def __init__(self, *peaks):
        left = iter(peaks)
        self.peaks = lambda: (next(left), 9999)


@pytest.mark.filterwarnings(
    "ignore:.*pad_token_id.*", "ignore:Passing a tuple of `past_key_values`"
)
def test_what_fails_or_has_no_time_left_is_written_down_and_the_others_are_measured(
    tmp_path, monkeypatch, capsys
):
    build, now = measure_gpu.as_random_model, iter([0.0] * 5 + [9e9])

    def fails_for_gpt2(config, workload, device):
        if config.model_type == "gpt2":
            raise RuntimeError("no kernel")
        return build(config, workload, device)

    monkeypatch.setattr(measure_gpu, "as_random_model", fails_for_gpt2)
    rows, about = measure_all(
        ["gpt2", "qwen2", "bert"], DRY, DryDevice(), tmp_path / "d", 25, lambda: next(now)
    )
    assert (about["failed"], about["left_out"]) == ({"gpt2": "RuntimeError: no kernel"}, ["bert"])
    assert {(row["model"], row["mode"]) for row in rows} == {
        ("qwen2", "train"),
        ("qwen2", "generate"),
    }
    assert all(row["error"] == row["simulated_peak_bytes"] / row["peak_bytes"] - 1 for row in rows)
    full = {**rows[0], "peak_bytes": None, "reserved_bytes": None, "error": None, "oom": True}
    shown = shown_of([{**rows[0], "error": 0.06}, full])
    assert "out of memory" in shown
    assert "1 of 2 shapes measured; further off than 5%: qwen2 train (1)" in shown


def smaller(kind: Any) -> Iterator[Any]:
    """Configs of a model with fewer and smaller layers that can be built: small in all sizes first, at last in few."""
    for depth, left_out in (*product((3, 8), LEFT_OUT), (3, OF_ANY)):
        sizes = {**OF_ANY, **dict.fromkeys(SIZES[3], depth)}
        with suppress(Exception):  # whatever the architecture's own code raises: other sizes may do
            config = kind(
                **{k: v for k, v in sizes.items() if k in kind().to_dict() and k not in left_out}
            )
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
    return [
        float(memory.batch_bytes(BatchShape.of(r.num_samples, dict(r.longest)))[0]) / r.batch_bytes
        for r in rows
    ]


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
            tried = (shares(config, mode) for config in smaller(kind))
            found[kind.__name__] = next((values for values in tried if values is not None), None)
    known = {name: values for name, values in found.items() if values is not None}
    assert {name: values for name, values in known.items() if min(values) < LEAST} == {}
    assert len(known) > len(KINDS) / SHARDS / 2


@pytest.mark.parametrize("name", WORKLOADS)
def test_shipped_artifact_is_monotone_on_a_dense_grid_and_budgets_say_what_it_says(name):
    regressor = MemoryRegressor.pretrained(WORKLOADS[name])
    if regressor.sharp:
        form = closed_form(WORKLOADS[name], regressor.card["constants"])
        assert np.min(form.phases.rows) >= 0
        assert 0 <= sum(form.shares(BatchShape.of(4, 100))) <= 1
    n = np.unique(np.geomspace(1, 4096, 30).astype(int))
    mesh_n, mesh_length = np.meshgrid(
        n, np.unique(np.geomspace(4, 16384, 30).astype(int)), indexing="ij"
    )
    for baseline in (BatchShape.of(1, 64), BatchShape.of(16, 2048), BatchShape.of(512, 128)):
        ratio = regressor.relative(
            BatchShape.of(mesh_n.ravel(), mesh_length.ravel()), baseline
        ).reshape(mesh_n.shape)
        assert (np.diff(ratio, axis=0) >= -1e-9 * ratio[1:]).all()
        assert (np.diff(ratio, axis=1) >= -1e-9 * ratio[:, 1:]).all()
    budget = MemoryBudget(16, longest=2048, model=regressor)
    most = budget.largest(lengths := np.unique(np.geomspace(1, 4096, 12).astype(np.int64)))
    assert budget.fits(BatchShape.of(np.maximum(most, 1), lengths))[most > 0].all()
    assert not budget.fits(BatchShape.of(most + 1, lengths)).any()
    assert (most[lengths <= 2048] >= 16).all()


def test_batch_size_alone_is_enough_knowing_more_is_bolder_and_the_regressor_is_asked_once():
    """Nothing known must allow for generation; training known need not."""
    budget = MemoryBudget(32).bind({"tokens": np.array([10, 500], np.int32)})
    training = MemoryRegressor.pretrained(Workload(mode="train"))
    assert budget.largest(np.array([500, 50])).tolist()[0] >= 32
    bolder = MemoryBudget(32, longest=500, model=training).largest(np.array([50]))[0]
    assert 48 < budget.largest(np.array([50]))[0] < bolder
    pairs = MemoryBudget(8, longest={"tokens": 1280, "target": 640}, model=training)
    shape = BatchShape.of([8, 9, 16], {"tokens": [1280, 1280, 8], "target": [640, 640, 4]})
    assert pairs.fits(shape).tolist() == [True, False, True]

    class Counting(MemoryRegressor):
        calls = 0

        def relative(self, shape, baseline, /):
            type(self).calls += 1
            return super().relative(shape, baseline)

    shipped = MemoryRegressor.pretrained()
    budget = MemoryBudget(8, longest=512, model=Counting(shipped.trees, shipped.card))
    budget.fits(BatchShape.of([1, 9], 100))
    asked = Counting.calls
    for length in range(1, 512):
        budget.fits(BatchShape.of([8, 16, 32], length))
    assert Counting.calls == asked


def rows(form, static=1000, shapes=None):
    shapes = shapes or [(n, length) for n in (1, 2, 4, 8) for length in (64, 128, 512, 1024)]
    return tuple(
        Measurement(n, {"tokens": length}, static, int(form(n, length))) for n, length in shapes
    )


def test_a_profile_finds_the_phases_and_says_once_when_it_guesses():
    def truth(n, length):
        return max(1e6 + 50 * n * length, 900 * n * length, 300 * n * length + 2 * n * length**2)

    profile = ProfiledMemory.fit(Measurements(rows(truth), Workload()))
    for n, length in ((3, 100), (16, 2048), (1, 16)):
        assert profile.batch_bytes(BatchShape.of(n, length))[0] == pytest.approx(
            truth(n, length), rel=0.05
        )
    assert profile.error < 0.02
    with pytest.warns(UserWarning, match="up to 1024 tokens, but a batch has one of 4096"):
        profile.batch_bytes(BatchShape.of(1, 4096))
    profile.batch_bytes(BatchShape.of(1, 4096))


def test_measurements_survive_parquet_absurd_ones_name_their_row_and_those_without_a_size_do_not_count(
    tmp_path,
):
    for size, oom in ((float("nan"), False), (-1, False), (float("inf"), False), (5, True)):
        with pytest.raises(
            ConfigError, match="row 0: sizes must be finite and at least 0, and `batch_bytes` None"
        ):
            Measurements((Measurement(1, {"tokens": 4}, 0, size, oom),), Workload())
    three = rows(lambda n, length: n * length, shapes=[(1, 8), (2, 8), (3, 8)])
    few = Measurements((*three, FULL), Workload(mode="train"))
    with pytest.raises(ConfigError, match="at least 4 rows"):
        ProfiledMemory.fit(few)
    with pytest.raises(ConfigError, match="at least 8 rows"):
        MemoryRegressor.fit(few)
    kept = Measurements(
        (*rows(lambda n, length: n * length), FULL), KNOWN, "measured", {"gpu": "x"}
    )
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


def test_a_regressor_learns_a_workload_of_your_own_and_says_the_same_after_loading(fitted):
    regressor, path = fitted
    shape, baseline = BatchShape.of([8, 4, 2], [512, 1024, 128]), BatchShape.of(8, 1024)
    true = np.array([truth(8, 512), truth(4, 1024), truth(2, 128)]) / truth(8, 1024)
    assert regressor.relative(shape, baseline) == pytest.approx(true, abs=0.1)
    again = MemoryRegressor.load(path)
    assert (again.relative(shape, baseline) == regressor.relative(shape, baseline)).all()
    assert (again.workload, again.fingerprint) == (KNOWN, regressor.fingerprint)
    assert "traced" not in str(again)
    other = MemoryRegressor.fit(
        Measurements(rows(lambda n, length: 2 * truth(n, length) + n**2), KNOWN)
    )
    assert other.fingerprint != regressor.fingerprint


def test_fitted_to_a_traced_workload_it_only_raises_the_trace():
    aligned = Phases(((0, 0, 0, 90, 0, 0.7, *[0] * 6),))  # type: ignore[arg-type]
    traced = Phases(((5000.0, *[0.0] * 11), (0, 0, 0, 100, 0, 1, *[0] * 6)), aligned=aligned)  # type: ignore[arg-type]
    shapes = [(n, length) for n in (1, 3, 20) for length in (16, 100, 900)]
    taken = rows(
        lambda n, length: max(5000, 100 * n * length + n * length**2) + 40_000, shapes=shapes
    )
    regressor = MemoryRegressor.fit(Measurements(taken, Workload(mode="train", phases=traced)))
    unseen = BatchShape.of([1, 2, 30], [50, 700, 300])
    for first, baseline in ((BatchShape.of(20, 912), aligned), (BatchShape.of(20, 900), traced)):
        said, plain = (
            regressor.relative(unseen, first),
            traced.bytes(unseen) / baseline.bytes(first),
        )
        assert (said >= plain * (1 - 1e-6)).all()
    assert said[0] > 1.2 * plain[0]  # the constant weighs on small batches
    assert "is traced (" in str(regressor)


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


def test_data_figures_and_report_belong_to_the_artifact_and_give_its_first_trees():
    """All its trees: below."""
    xgboost = pytest.importorskip("xgboost")
    card, result = MemoryRegressor.pretrained().card, json.loads(report.RESULTS.read_text())
    assert (
        card["data_sha256"]
        == result["data_sha256"]
        == hashlib.sha256(DATA.read_bytes()).hexdigest()
    )
    assert card["recipe"] == result["recipe"]
    assert report.REPORT.read_text() == report.write(result)
    few = Recipe(trees=replace(Recipe().trees, rounds=20))
    again = train(load_groups(DATA), few, constants=card["constants"])
    boosters = [
        xgboost.Booster(model_file=bytearray(trees))
        for trees in (again.trees, SHIPPED.read_bytes())
    ]
    made, shipped = (booster.get_dump() for booster in boosters)
    assert made == shipped[:20]
    said = json.loads(json.dumps(again.card))
    del said["hashes"]
    assert {name: card.get(name) for name in said} == said


@pytest.mark.slow  # half a minute, nearly all of it for the constants
def test_the_committed_data_gives_the_artifact_bit_for_bit(tmp_path):
    again = tmp_path / "pretrained.ubj"
    command = [sys.executable, "-m", "regressor.train", "--no-evaluation", "--artifact", str(again)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert again.read_bytes() == SHIPPED.read_bytes()
    assert again.with_suffix(".json").read_text() == SHIPPED.with_suffix(".json").read_text()


def test_the_trees_of_a_regressor_are_read_once(monkeypatch):
    made, booster = [], xgboost.Booster
    monkeypatch.setattr(
        xgboost, "Booster", lambda *args, **how: made.append(1) or booster(*args, **how)
    )
    for _ in range(3):
        MemoryRegressor.pretrained(KNOWN).relative(BatchShape.of(8, 100), BatchShape.of(4, 256))
    assert len(made) <= 1
