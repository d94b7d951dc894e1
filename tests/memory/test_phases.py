"""A traced workload says what simulating the whole model says, for shapes that nobody traced."""

import sys
import warnings
from functools import cache

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup.budget.memory import MemoryBudget
from dynagroup.errors import ConfigError
from dynagroup.memory import ClosedForm, MemoryRegressor, TracedMemory, Workload, simulate
from dynagroup.memory.regressor import Plausible, member
from dynagroup.memory.run import Phases
from dynagroup.memory.trace import phases
from dynagroup.shapes import BatchShape
from tests import models

SMALL = {"vocab": 900, "width": 64, "heads": 4, "inner": 160}
LLAMA = models.llama(**SMALL, layers=7, num_key_value_heads=2)
BERT = models.bert(**SMALL, layers=6, dropout=0.1)
T5 = models.t5(**{**SMALL, "inner": 128}, layers=5, d_kv=16, dropout=0.1)
GPT2 = models.gpt2(**{**SMALL, "inner": 256}, layers=6, dropout=0.1, n_positions=128)
# Its first six of seven layers slide; what one layer adds is not what the next one does.
GEMMA = models.config(hf.Gemma3TextConfig, **SMALL, layers=7, num_key_value_heads=2, head_dim=16, sliding_window=112)
MIXTRAL = models.config(hf.MixtralConfig, **SMALL, layers=6, num_key_value_heads=2, num_local_experts=4)

CASES = {
    "llama": (LLAMA, "train", {"dtype": "bfloat16"}),
    "llama checkpointed": (LLAMA, "train", {"dtype": "bfloat16", "gradient_checkpointing": True}),
    "llama autocast": (LLAMA, "train", {"dtype": "float32", "autocast": "bfloat16", "attention": "eager"}),
    "llama generating": (LLAMA, "generate", {"dtype": "bfloat16", "max_new_tokens": 70}),
    "bert": (BERT, "train", {}),
    "bert forward": (BERT, "forward", {"attention": "eager"}),
    "gpt2": (GPT2, "train", {}),
    "t5": (T5, "train", {"dtype": "bfloat16"}),
    "t5 generating": (T5, "generate", {"max_new_tokens": 30}),
    "gemma": (GEMMA, "train", {"dtype": "bfloat16"}),
    "gemma generating": (GEMMA, "generate", {"dtype": "bfloat16", "max_new_tokens": 40}),
    "mixtral autocast": (MIXTRAL, "train", {"dtype": "float32", "autocast": "bfloat16"}),
}
SHAPES = [(1, 33), (3, 120), (7, 97), (40, 21)]
LONG = [(2, 700), (1, 411)]


@cache
def workload_of(name):
    config, mode, known = CASES[name]
    return config, Workload.from_model(config, mode, **known)


@pytest.mark.parametrize("name", CASES)
def test_a_traced_workload_agrees_with_the_whole_model(name):
    config, workload = workload_of(name)
    assert workload.phases is not None
    shapes = SHAPES + ([] if name.split()[0] in ("bert", "gpt2") else LONG)
    if name == "t5":
        shapes = [
            (n, {"tokens": length, "target": target})
            for (n, length), target in zip(shapes, (90, 14, 300, 55, 60, 777), strict=True)
        ]  # noqa: E501
    form = ClosedForm.of(workload)
    for row in simulate(config, workload, shapes):
        stated = float(form.batch_bytes(BatchShape.of(row.num_samples, dict(row.longest)))[0])
        assert stated == pytest.approx(row.batch_bytes, rel=0.05), (row.num_samples, row.longest)


def test_a_cache_that_slides_stops_growing():
    """The cache of six layers of seven holds 111 positions, whatever the length."""
    found = workload_of("gemma generating")[1].phases
    assert found.until == 112 - 40
    at_border, beyond, without = (ClosedForm.of_phases(p) for p in (found, Phases(found.after), Phases(found.rows)))
    short, long = BatchShape.of(16, 20), BatchShape.of(16, 140)
    assert at_border.batch_bytes(short) == without.batch_bytes(short) < beyond.batch_bytes(short)
    assert at_border.batch_bytes(long) == beyond.batch_bytes(long) <= without.batch_bytes(long)


@settings(max_examples=25)
@given(
    st.sampled_from(sorted(CASES)), st.integers(1, 300), st.integers(1, 3000), st.integers(0, 50), st.integers(0, 400)
)
def test_a_traced_workload_keeps_the_law_of_budgets(name, n, length, more, longer):
    regressor = MemoryRegressor.pretrained(workload_of(name)[1])
    shapes = BatchShape.of([n, n + more, n, n + more], [length, length, length + longer, length + longer])
    ratio = regressor.relative(shapes, BatchShape.of(8, 256))
    assert ratio[0] <= min(ratio[1:3])
    assert max(ratio[1:3]) <= ratio[3]
    assert regressor.relative(BatchShape.of(8, 250), BatchShape.of(8, 250)).tolist() == [1.0]


def test_a_first_batch_that_needs_no_padded_mask_is_not_charged_for_one():
    """512 is a multiple of 16, so this batch has one mask less than its successors, which masks dominate here."""
    config = models.bert(vocab=1000, width=64, heads=4, dropout=0.1)
    workload = Workload.from_model(config, mode="forward")
    budget = MemoryBudget(16, longest=512, model=MemoryRegressor.pretrained(workload))
    lengths = np.array([280, 171, 110, 60])
    shapes = [(16, 512), *zip(budget.largest(lengths).tolist(), lengths.tolist(), strict=True)]
    first, *later = [row.batch_bytes for row in simulate(config, workload, shapes)]
    assert 0.8 * first < max(later) <= 0.92 * first


def test_what_was_traced_holds_for_that_workload_only():
    _, workload = workload_of("llama")
    assert workload.replace(gradient_checkpointing=True).phases is None
    assert workload.replace(dtype="bfloat16").phases == workload.phases
    assert Workload.from_json(workload.to_json()) == workload
    assert Workload.from_model(LLAMA, trace=False).phases is None
    for rows in ([], [[1.0, 2.0]]):
        with pytest.raises(ConfigError, match="`phases` needs rows of 12 numbers"):
            Phases(rows)
    with pytest.raises(ConfigError, match="`phases` has a size below zero or NaN"):
        workload.replace(phases=Phases(((float("nan"),) * 12,)))


def test_a_traced_workload_needs_no_training_range():
    """Far beyond what the trees saw: traced, there is nothing to be careful about."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ratio = MemoryRegressor.pretrained(workload_of("llama")[1]).relative(
            BatchShape.of([1, 2], 4), BatchShape.of(1, 4)
        )
    assert ratio.tolist()[0] == 1.0


def test_a_model_that_cannot_be_traced_is_estimated_and_says_why():
    class Odd(hf.LlamaForCausalLM):
        def forward(self, input_ids=None, **kwargs):
            if input_ids.sum().item() > 3:
                input_ids = input_ids + 1
            return super().forward(input_ids=input_ids, **kwargs)

    model = Odd(LLAMA)
    with pytest.warns(UserWarning, match="estimated from its sizes, because this model cannot be traced"):
        workload = Workload.from_model(model)
    assert workload.phases is None
    assert workload.hidden_size == 64


def test_what_is_no_model_of_transformers_is_refused_with_a_way_out():
    with pytest.raises(ConfigError, match="has no transformers config; write Workload"):
        Workload.from_model(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="`workload` must be a Workload, but is LlamaConfig"):
        MemoryRegressor.pretrained(LLAMA)


def test_a_model_that_reads_images_is_not_traced_without_them():
    config = hf.LlavaConfig(text_config=models.llama(**SMALL))
    with pytest.warns(UserWarning, match="it reads images, of which text says nothing"):
        assert Workload.from_model(config).phases is None


def test_attention_that_the_model_lacks_is_refused():
    config = models.config(hf.Gemma2Config, **SMALL, layers=3, num_key_value_heads=2, head_dim=16)
    for ask in (Workload.from_model, TracedMemory.of):
        for model in (config, hf.Gemma2ForCausalLM(config)):
            for attention in ("sdpa", "flash"):
                with pytest.raises(
                    ConfigError, match=f"`attention` is '{attention}', but Gemma2ForCausalLM has no fused attention"
                ):
                    ask(model, attention=attention)
    assert Workload.from_model(config, trace=False).attention == "eager"


def test_a_config_of_which_no_model_can_be_built_is_refused():
    config = hf.ModernBertConfig(vocab_size=2000, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    assert config.pad_token_id >= 2000
    with pytest.raises(
        ConfigError, match=r"no model can be built from this ModernBertConfig \(AssertionError: Padding"
    ):
        TracedMemory.of(config)


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for model in ("gpt2", LLAMA):
        with pytest.raises(ConfigError, match=r"needs transformers: pip install dynagroup\[hf\]"):
            TracedMemory.of(model)


def test_a_program_that_loops_over_tokens_is_fitted_to_simulations():
    """A state space model without its kernels: its program is another one for each length."""
    config = hf.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1)
    with pytest.warns(UserWarning, match="fitted to simulations of up to 257 tokens, because the program depends"):
        memory = TracedMemory.of(config, "forward", dtype="bf16")
    for row in simulate(config, memory.workload, [(1, 1), (8, 64), (3, 300), (64, 9)]):
        stated = float(memory.batch_bytes(BatchShape.of(row.num_samples, dict(row.longest)))[0])
        assert 0.97 < stated / row.batch_bytes < 1.2, (row.num_samples, row.longest)


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        (hf.LongformerConfig(vocab_size=90, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                             attention_window=32), "train"),
        (hf.Mamba2Config(vocab_size=90, hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16, state_size=8, n_groups=1,
                         chunk_size=32), "forward"),
    ],
    ids=["longformer", "mamba2"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:the memory of this model is fitted:UserWarning")
def test_a_program_that_pads_its_input_is_never_predicted_smaller(config, mode):
    """To windows or chunks of 32: traced at multiples of 32, a batch one token longer would be predicted far too small."""
    memory = TracedMemory.of(config, mode)
    shapes = [(3, 1), (2, 33), (5, 16), (3, 65), (8, 200), (3, 257), (1, 500)]
    for row in simulate(config, memory.workload, shapes):
        stated = float(memory.batch_bytes(BatchShape.of(row.num_samples, dict(row.longest)))[0])
        assert 0.97 < stated / row.batch_bytes < 2, (row.num_samples, row.longest)


def test_what_can_neither_be_traced_nor_simulated_is_refused_in_bytes():
    config = hf.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1)
    with pytest.raises(ConfigError, match=r"cannot be traced \(.*ProfiledMemory\.fit\(measure"):
        TracedMemory.of(config, "generate")  # its cache has no length
    images = hf.LlavaConfig(text_config=models.llama(**SMALL))
    with pytest.raises(ConfigError, match="reads images, of which text says nothing"):
        TracedMemory.of(images)


@pytest.mark.parametrize("known", [{"autocast": "bfloat16"}, {"autocast": "bfloat16", "gradient_checkpointing": True}])
def test_three_layers_say_what_many_do_without_tracing_them_all(known, monkeypatch):
    """Also where autocast's copies of weights end with the forward pass: the whole model is only run to check that."""
    runs = []
    inner = phases.trace
    monkeypatch.setattr(phases, "trace", lambda model, *args, **more: runs.append(model) or inner(model, *args, **more))
    Workload.from_model(LLAMA, dtype="float32", attention="eager", **known)
    assert sum(len(model.model.layers) == 7 for model in runs) == 1


def one(mode, per_token, per_sample=0.0, **known):
    return member(Workload(mode=mode, **known), False, [[0.0, per_sample, 0.0, per_token, *[0.0] * 8]])


def test_models_that_disagree_with_what_is_known_do_not_count():
    members = [
        one("train", 10.0),
        one("generate", 1.0, 1000.0, max_new_tokens=100),
        one("train", 1.0, 99.0, fixed_tokens=99),
    ]
    shape = BatchShape.of([2, 4], 100)
    assert Plausible(Workload(mode="train"), members, False).batch_bytes(shape).tolist() == [[2000.0], [4000.0]]
    assert Plausible(Workload(), members, False).batch_bytes(shape).tolist() == [[2000.0, 2200.0], [4000.0, 4400.0]]
    whisper = Workload(mode="train", fixed_tokens=50)
    assert Plausible(whisper, members, False).batch_bytes(shape).tolist() == [[398.0], [796.0]]


def test_the_nearest_sizes_count():
    members = [one("generate", 1.0, 10.0 * new, max_new_tokens=new) for new in range(1, 101)]
    near = Plausible(Workload(mode="generate", max_new_tokens=80), members, False).batch_bytes(BatchShape.of(1, 1))
    assert near.shape == (1, 33)
    assert near.min() > 600


def test_knowing_more_never_makes_it_bolder_than_what_is_so():
    """Nothing known must allow for generation; training known need not."""
    first, later = BatchShape.of(32, 512), BatchShape.of(128, 64)
    nothing = MemoryRegressor.pretrained().relative(later, first)[0]
    training = MemoryRegressor.pretrained(Workload(mode="train")).relative(later, first)[0]
    assert training < nothing
