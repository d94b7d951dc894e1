"""Two jobs whose results may differ have other identities; the same job has the same one in every process."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers

from dynagroup.oom.identity import identity_of
from tests.oom.texts import TEXTS, adapted, small_llama, small_tokenizer
from tests.torchrun import ROOT


class Processor(transformers.LogitsProcessor):
    """An argument whose default representation holds an address."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self.token] = -float("inf")
        return scores


def settings(token: int = 3, **more: Any) -> dict[str, Any]:
    arguments = {"logits_processor": transformers.LogitsProcessorList([Processor(token)]), **more}
    return {"task": "generate", "max_length": None, "arguments": arguments}


def identity(model: Any = None, tokenizer: Any = None, texts: Any = TEXTS, **more: Any) -> dict[str, Any]:
    return identity_of(model or small_llama(), tokenizer or small_tokenizer(), texts, settings(**more))


@pytest.fixture(scope="module")
def first() -> dict[str, Any]:
    return identity()


def test_the_same_job_is_the_same_in_another_process(first: dict[str, Any]) -> None:
    code = "import json, tests.oom.test_identity as t; print(json.dumps(t.identity()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == first


def test_a_tokenizer_that_was_used_is_still_the_same(first: dict[str, Any]) -> None:
    used = small_tokenizer()
    used(TEXTS, truncation=True, max_length=3, padding=True)
    assert identity(tokenizer=used) == first


def differing(first: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert first.keys() == other.keys()
    return [name for name in first if first[name] != other[name]]


def test_texts_are_told_apart_also_when_they_join_to_the_same(first: dict[str, Any]) -> None:
    joined = [TEXTS[0] + TEXTS[1][:1], TEXTS[1][1:], *TEXTS[2:]]
    assert "".join(joined) == "".join(TEXTS)
    assert differing(first, identity(texts=joined)) == ["texts"]
    assert differing(first, identity(texts=TEXTS[::-1])) == ["texts"]
    assert identity(texts=["\ud800"]) != identity(texts=["\ud801"])


@pytest.mark.parametrize("position", ["first", "last", "swapped"])
def test_other_weights_are_noticed(position: str, first: dict[str, Any]) -> None:
    model = small_llama()
    with torch.no_grad():
        weights = model.model.layers[1].mlp.up_proj.weight
        if position == "swapped":
            weights[[0, 1]] = weights[[1, 0]]
        else:
            row = {"first": 0, "last": -1}[position]
            weights[row, row] *= 1.0001
    assert differing(first, identity(model)) == ["model"]


def test_large_weights_are_told_apart_by_checksums_also_when_rows_change_places() -> None:
    def of(tensor: torch.Tensor) -> str:
        model = torch.nn.Module()
        model.register_buffer("table", tensor)
        return identity_of(model, small_tokenizer(), [], {})["model"]  # type: ignore[return-value]

    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.complex64, torch.bool):
        table = torch.randn(1000, 300).mul(50).clamp(min=0).to(dtype)
        changed, swapped = table.clone(), table.clone()
        changed[777, 7] = -table[777, 7] + 1 if dtype != torch.bool else ~table[777, 7]
        swapped[[3, 500]] = table[[500, 3]]
        assert len({of(table), of(changed), of(swapped), of(table.T)}) == 4
        assert of(table.clone()) == of(table)


def test_another_generation_config_config_or_tokenizer_is_noticed(first: dict[str, Any]) -> None:
    model = small_llama()
    model.generation_config.num_beams = 3
    assert differing(first, identity(model)) == ["model's generation_config"]
    model = small_llama()
    model.config.rms_norm_eps = 1e-3
    assert differing(first, identity(model)) == ["model's config"]
    tokenizer = small_tokenizer()
    tokenizer.add_tokens(["w1 w2"])
    assert differing(first, identity(tokenizer=tokenizer)) == ["tokenizer"]


@pytest.fixture(scope="module")
def with_adapters() -> Any:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    return adapted(small_llama(), lora, "first", "second")


@pytest.mark.parametrize("change", ["another adapter", "both adapters", "switched off", "scaled", "merged"])
def test_what_is_done_with_adapters_is_noticed(change: str, with_adapters: Any) -> None:
    model = with_adapters
    before = identity(model)
    scalings = [m.scaling for m in model.modules() if isinstance(getattr(m, "scaling", None), dict)]
    assert identity(model) == before
    with contextlib.ExitStack() as undo:
        undo.callback(model.set_adapter, "first")
        if change == "another adapter":
            model.set_adapter("second")
        elif change == "both adapters":
            model.base_model.set_adapter(["first", "second"])
        elif change == "switched off":
            undo.enter_context(model.disable_adapter())
        elif change == "merged":
            undo.callback(model.unmerge_adapter)
            model.merge_adapter()
        else:
            for scaling in scalings:
                undo.callback(scaling.update, dict(scaling))
                scaling["first"] *= 2
        assert "model's switches" in differing(before, identity(model))


def test_plain_settings_of_a_module_are_noticed_and_running_a_model_changes_none(first: dict[str, Any]) -> None:
    model = small_llama()
    model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=3)
    model.train()
    assert identity(model) == first
    model.temperature = 2.0
    assert differing(first, identity(model)) == ["model's switches"]


def test_other_arguments_are_noticed_also_within_objects(first: dict[str, Any]) -> None:
    assert differing(first, identity(token=4)) == ["arguments"]
    assert differing(first, identity(generation_config=transformers.GenerationConfig(num_beams=2))) == ["arguments"]
    a, b = (identity(generation_config=transformers.GenerationConfig(num_beams=n)) for n in (2, 3))
    assert differing(a, b) == ["arguments"]


def test_where_a_model_was_loaded_from_is_no_matter(first: dict[str, Any]) -> None:
    model = small_llama()
    model.config._name_or_path = "elsewhere"
    model.generation_config.transformers_version = "9.9"
    assert identity(model) == first
