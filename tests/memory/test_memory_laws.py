"""Laws of the memory models: monotone predictions, tables that agree with budgets, damaged artifacts refused."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup.budget.memory import MemoryBudget
from dynagroup.errors import ConfigError, StateError
from dynagroup.memory import ClosedForm, Measurement, Measurements, MemoryRegressor, ProfiledMemory, Workload
from dynagroup.memory.features import FEATURES, MONOTONE
from dynagroup.shapes import BatchShape
from dynagroup.state import seal_of

KNOWN = Workload(
    mode="train", num_layers=24, num_encoder_layers=0, hidden_size=896, num_heads=14, num_kv_heads=2, head_size=64,
    intermediate_size=4864, experts_per_token=1, gated_mlp=True, dropout=False, vocabulary_size=151936, lm_head=True,
    tied_embeddings=True, encoder_decoder=False, fixed_tokens=0, num_parameters=494032768, trainable_share=1.0,
    dtype="bfloat16", attention="sdpa", score_bias=False, gradient_checkpointing=False, optimizer_bytes=4.0, ddp=False,
    max_new_tokens=0,
)  # fmt: skip
WORKLOADS = {
    "unknown": Workload(),
    "train": KNOWN,
    "eager": KNOWN.replace(attention="eager", gradient_checkpointing=True),
    "generate": KNOWN.replace(mode="generate", max_new_tokens=256, trainable_share=0.0, optimizer_bytes=0.0),
    "mode": Workload(mode="generate"),
    "strange": KNOWN.replace(hidden_size=20480, num_heads=320, num_layers=200),
}


@pytest.mark.filterwarnings("ignore:the regressor never saw:UserWarning")
@pytest.mark.parametrize("name", WORKLOADS)
def test_shipped_artifact_is_monotone_on_a_dense_grid(name):
    regressor = MemoryRegressor.pretrained(WORKLOADS[name])
    n = np.unique(np.geomspace(1, 4096, 30).astype(int))
    length = np.unique(np.geomspace(4, 16384, 30).astype(int))
    mesh_n, mesh_length = np.meshgrid(n, length, indexing="ij")
    for baseline in (BatchShape.of(1, 64), BatchShape.of(16, 2048), BatchShape.of(512, 128)):
        ratio = regressor.relative(BatchShape.of(mesh_n.ravel(), mesh_length.ravel()), baseline).reshape(mesh_n.shape)
        assert (np.diff(ratio, axis=0) >= -1e-9 * ratio[1:]).all()
        assert (np.diff(ratio, axis=1) >= -1e-9 * ratio[:, 1:]).all()


def test_constraints_are_on_exactly_the_features_of_the_candidate():
    assert dict(zip(FEATURES, MONOTONE, strict=True))["closed_form"] == 1
    assert sum(MONOTONE) == 5


@settings(max_examples=8)
@given(st.integers(1, 64), st.integers(8, 4096), st.sampled_from(sorted(WORKLOADS)))
@pytest.mark.filterwarnings("ignore:the regressor never saw:UserWarning")
def test_largest_agrees_with_fits(batch_size, longest, name):
    budget = MemoryBudget(batch_size, longest=longest, model=MemoryRegressor.pretrained(WORKLOADS[name]))
    lengths = np.unique(np.geomspace(1, 2 * longest, 12).astype(np.int64))
    most = budget.largest(lengths)
    assert most is not None
    assert budget.fits(BatchShape.of(np.maximum(most, 1), lengths))[most > 0].all()
    assert not budget.fits(BatchShape.of(most + 1, lengths)).any()
    assert (most[lengths <= longest] >= batch_size).all()
    assert (np.diff(most) <= 0).all()


def test_a_budget_asks_the_regressor_once_for_all_batches():
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


def test_batch_size_alone_is_enough():
    budget = MemoryBudget(32).bind({"tokens": np.array([10, 500], np.int32)})
    assert budget.largest(np.array([500, 50])).tolist()[0] >= 32
    assert budget.largest(np.array([50]))[0] > 48
    training = MemoryBudget(32, longest=500, model=MemoryRegressor.pretrained(Workload(mode="train")))
    assert training.largest(np.array([50]))[0] > 256
    assert "regressor-" in budget.fingerprint
    assert budget.fingerprint != MemoryBudget(32, longest=500, model=MemoryRegressor.pretrained(KNOWN)).fingerprint


def test_two_streams_are_one_table():
    training = MemoryRegressor.pretrained(Workload(mode="train"))
    budget = MemoryBudget(8, longest={"tokens": 1280, "target": 640}, model=training)
    shape = BatchShape.of([8, 9, 16], {"tokens": [1280, 1280, 8], "target": [640, 640, 4]})
    assert budget.fits(shape).tolist() == [True, False, True]


def rows(form, static=1000, shapes=None):
    shapes = shapes or [(n, length) for n in (1, 2, 4, 8) for length in (64, 128, 512, 1024)]
    return tuple(Measurement(n, {"tokens": length}, static, int(form(n, length))) for n, length in shapes)


def test_a_profile_finds_the_phases():
    def truth(n, length):
        return max(1e6 + 50 * n * length, 900 * n * length, 300 * n * length + 2 * n * length**2)

    profile = ProfiledMemory.fit(Measurements(rows(truth), Workload()))
    for n, length in ((3, 100), (16, 2048), (1, 16)):
        assert profile.batch_bytes(BatchShape.of(n, length))[0] == pytest.approx(truth(n, length), rel=0.05)
    assert profile.error < 0.02


def test_how_many_fit_in_these_bytes():
    shapes = [(n, length) for n in (1, 2, 4) for length in (64, 512, 8192)]
    profile = ProfiledMemory.fit(Measurements(rows(lambda n, length: 10 * n * length, shapes=shapes), Workload()))
    budget = MemoryBudget.from_bytes(101_001, model=profile, headroom=1.0)
    most = budget.largest(np.array([10, 100, 10_001]))
    assert most.tolist() == [1000, 100, 0]


def test_a_profile_says_when_it_guesses():
    profile = ProfiledMemory.fit(Measurements(rows(lambda n, length: 10 * n * length), Workload()))
    profile.batch_bytes(BatchShape.of(1, 2048))
    with pytest.warns(UserWarning, match="up to 1024 tokens and is asked about 4096"):
        profile.batch_bytes(BatchShape.of(1, 4096))
    profile.batch_bytes(BatchShape.of(1, 4096))  # said once


def test_out_of_memory_is_never_a_number():
    with pytest.raises(ConfigError, match="ran out of memory has no size"):
        Measurements((Measurement(1, {"tokens": 4}, 0, 5, oom=True),), Workload())
    kept = Measurements(
        (*rows(lambda n, length: n * length), Measurement(99, {"tokens": 4096}, 0, None, oom=True)), Workload()
    )
    assert len(kept.complete) == len(kept) - 1
    ProfiledMemory.fit(kept)


@pytest.mark.parametrize("value", [float("nan"), -1, float("inf")])
def test_absurd_measurements_name_their_row(value):
    with pytest.raises(ConfigError, match=r"row 0: `batch_bytes` must be a finite number"):
        Measurements((Measurement(1, {"tokens": 4}, 0, value),), Workload())


def test_too_few_rows():
    few = Measurements(rows(lambda n, length: n * length, shapes=[(1, 8), (2, 8)]), Workload(mode="train"))
    with pytest.raises(ConfigError, match="at least 4 rows"):
        ProfiledMemory.fit(few)
    with pytest.raises(ConfigError, match="at least 8 measurements"):
        MemoryRegressor.fit(few)


def test_measurements_survive_parquet(tmp_path):
    kept = Measurements(
        (*rows(lambda n, length: n * length), Measurement(9, {"tokens": 4}, 0, None, oom=True)),
        KNOWN,
        "measured",
        {"gpu": "x"},
    )
    kept.to_parquet(tmp_path / "rows.parquet")
    assert Measurements.from_parquet(tmp_path / "rows.parquet") == kept


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    def truth(n, length):
        return 1e7 + 900 * n * length + n * length**2

    regressor = MemoryRegressor.fit(Measurements(rows(truth), KNOWN), rounds=60)
    path = tmp_path_factory.mktemp("artifact") / "mine.ubj"
    regressor.save(path)
    return regressor, path, truth


def test_a_regressor_learns_a_workload_of_your_own_and_says_the_same_after_loading(fitted):
    regressor, path, truth = fitted
    shape, baseline = BatchShape.of([8, 4, 2], [512, 1024, 128]), BatchShape.of(8, 1024)
    true = np.array([truth(8, 512), truth(4, 1024), truth(2, 128)]) / truth(8, 1024)
    assert regressor.relative(shape, baseline) == pytest.approx(true, abs=0.1)
    again = MemoryRegressor.load(path)
    assert (again.relative(shape, baseline) == regressor.relative(shape, baseline)).all()
    assert (again.workload, again.fingerprint) == (KNOWN, regressor.fingerprint)
    other = MemoryRegressor.fit(Measurements(rows(lambda n, length: 2 * truth(n, length) + n**2), KNOWN), rounds=60)
    assert other.fingerprint != regressor.fingerprint


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.write_bytes(b"\x80\x04pickle"), "is not UBJSON"),
        (lambda p: p.write_bytes(p.read_bytes()[:-9] + b"123456789"), "has hash"),
        (lambda p: p.with_suffix(".json").unlink(), "card beside it"),
        (lambda p: p.with_suffix(".json").write_text("{"), "is not JSON"),
        (lambda p: edit(p, features=["other"]), "computes other features"),
        (lambda p: edit(p, format=99), "has format 99"),
        (lambda p: digit(p), "is not as it was saved"),
        (lambda p: p.unlink(), "is missing"),
    ],
)
def test_damaged_artifacts_are_refused(fitted, tmp_path, damage, message):
    for file in (fitted[1], fitted[1].with_suffix(".json")):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    damage(tmp_path / "mine.ubj")
    with pytest.raises(StateError, match=message):
        MemoryRegressor.load(tmp_path / "mine.ubj")


def edit(path, **changes):
    """Change the card, and seal it as if it had been saved so."""
    card = path.with_suffix(".json")
    changed = {**json.loads(card.read_text()), **changes}
    card.write_text(json.dumps({**changed, "seal": seal_of(changed)}))


def digit(path):
    """A constant of the card is another number."""
    card = path.with_suffix(".json")
    card.write_text(json.dumps({**json.loads(card.read_text()), "constants": {"keep_hidden": 0.1}}))


def test_xgboost_is_needed_for_trees_alone(fitted):
    code = """
import sys
for name in ("xgboost", "scipy"):
    sys.modules[name] = None
import numpy as np
from transformers import GPT2Config
from dynagroup import LengthAwareBatchSampler, MemoryBudget, TokenBudget
from dynagroup.errors import ConfigError
from dynagroup.memory import MemoryRegressor, Workload
from dynagroup.shapes import BatchShape
lengths = [3, 9, 4, 100]
config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=50)
for budget in (TokenBudget(200), 200, MemoryBudget(2), MemoryBudget.from_model(config, "1GB")):
    assert len(LengthAwareBatchSampler(lengths, budget, rank=0, world_size=1)) >= 1
sizes = Workload.from_model(config, trace=False)
try:
    MemoryRegressor.pretrained(sizes).relative(BatchShape.of(2, 8), BatchShape.of(4, 8))
except ConfigError as error:
    assert "pip install dynagroup[memory]" in str(error)
else:
    raise AssertionError("trees were asked without xgboost")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_only_ubjson_is_written(fitted):
    with pytest.raises(ConfigError, match=r"must end in \.ubj"):
        fitted[0].save("model.pkl")


def test_outside_the_trained_range_it_is_careful_and_says_so_once():
    regressor = MemoryRegressor.pretrained(WORKLOADS["strange"])
    with pytest.warns(UserWarning, match="never saw a workload"):
        ratio = regressor.relative(BatchShape.of([8, 16], 512), BatchShape.of(8, 512))
    assert ratio[1] >= 1.9
    regressor.relative(BatchShape.of([8, 16], 512), BatchShape.of(8, 512))


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_the_closed_form_is_monotone_and_positive(workload):
    form = ClosedForm.of(workload)
    assert (form.phases >= 0).all()
    assert form.shares(BatchShape.of(4, 100))[0, :-1].sum() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "serve"}, "`mode` must be one of 'train'"),
        ({"num_layers": 0}, "`num_layers` must be an int of at least 1"),
        ({"hidden_size": 2.5}, "`hidden_size` must be an int"),
        ({"num_heads": 4, "num_kv_heads": 8}, "at most `num_heads` "),
        ({"trainable_share": 1.5}, "between 0 and 1"),
        ({"optimizer_bytes": -1}, "between 0 and 64"),
        ({"dropout": 0.1}, "`dropout` must be True or False"),
    ],
)
def test_a_workload_that_cannot_be(fields, message):
    with pytest.raises(ConfigError, match=message):
        Workload(**fields)
