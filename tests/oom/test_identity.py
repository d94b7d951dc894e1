"""Two jobs whose results may differ have other identities; the same job has the same one in every process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dynagroup.oom.jobs import identity_of
from tests.oom.texts import TEXTS, adapted, small_llama, small_tokenizer


class Processor(transformers.LogitsProcessor):
    """An argument whose default representation holds an address."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def identity(model=None, tokenizer=None, texts: Any = TEXTS, token: int = 3, **more: Any) -> dict[str, Any]:
    arguments = {"logits_processor": transformers.LogitsProcessorList([Processor(token)]), **more}
    settings = {"task": "generate", "max_length": None, "arguments": arguments}
    return identity_of(model or small_llama(), tokenizer or small_tokenizer(), texts, settings)


@pytest.fixture(scope="module")
def first() -> dict[str, Any]:
    return identity()


def test_having_been_used_or_loaded_elsewhere_is_no_matter(first: dict[str, Any], tmp_path: Path) -> None:
    used, model = small_tokenizer(), small_llama()
    used(TEXTS, truncation=True, max_length=3, padding=True)
    model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=3)
    model.train()
    model.save_pretrained(tmp_path)
    model.config._name_or_path = "elsewhere"
    model.generation_config.transformers_version = "9.9"
    assert identity(model, used) == first


def differing(first: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert first.keys() == other.keys()
    return [name for name in first if first[name] != other[name]]


def test_other_texts_arguments_or_tokenizers_are_noticed(first: dict[str, Any]) -> None:
    joined = [TEXTS[0] + TEXTS[1][:1], TEXTS[1][1:], *TEXTS[2:]]
    assert differing(first, identity(texts=joined)) == differing(first, identity(texts=TEXTS[::-1])) == ["texts"]
    assert identity(texts=["\ud800"]) != identity(texts=["\ud801"])
    assert differing(first, identity(token=4)) == ["arguments"]
    a, b = (identity(generation_config=transformers.GenerationConfig(num_beams=n)) for n in (2, 3))
    assert differing(a, b) == differing(first, a) == ["arguments"]
    tokenizer = small_tokenizer()
    tokenizer.add_tokens(["w1 w2"])
    assert differing(first, identity(tokenizer=tokenizer)) == ["tokenizer"]


def swap(model: Any) -> None:
    rows = model.model.layers[1].mlp.up_proj.weight
    rows[[0, 1]] = rows[[1, 0]]


CHANGES: dict[str, list[Callable[[Any], Any]]] = {
    "model": [
        swap,
        lambda model: model.model.layers[1].mlp.up_proj.weight[-1, -1].mul_(1.0001),
        lambda model: model.model.register_buffer("scale", torch.ones(2), persistent=False),
    ],
    "model's attention": [lambda model: model.set_attn_implementation("eager")],
    "model's generation_config": [lambda model: setattr(model.generation_config, "num_beams", 3)],
    "model's config": [lambda model: setattr(model.config, "rms_norm_eps", 1e-3)],
    "model's switches": [lambda model: setattr(model, "temperature", 2.0)],
}


def test_another_model_is_noticed(first: dict[str, Any]) -> None:
    for name, changes in CHANGES.items():
        for change in changes:
            model = small_llama()
            with torch.no_grad():
                change(model)
            assert differing(first, identity(model)) == [name]


def test_large_weights_are_told_apart_by_checksums_also_when_rows_change_places() -> None:
    def of(tensor: torch.Tensor) -> str:
        model = torch.nn.Module()
        model.register_buffer("table", tensor)
        return identity_of(model, small_tokenizer(), [], {})["model"]

    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.complex64, torch.bool):
        table = torch.randn(1000, 300).mul(50).clamp(min=0).to(dtype)
        changed, swapped = table.clone(), table.clone()
        changed[777, 7] = -table[777, 7] + 1 if dtype != torch.bool else ~table[777, 7]
        swapped[[3, 500]] = table[[500, 3]]
        assert len({of(table), of(changed), of(swapped), of(table.T)}) == 4
        assert of(table.clone()) == of(table)


def test_what_is_done_with_adapters_is_noticed() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = adapted(small_llama(), lora, "first", "second")
    seen = [before := identity(model)]
    for adapters in ("second", ["first", "second"]):
        model.base_model.set_adapter(adapters)
        seen.append(identity(model))
    model.set_adapter("first")
    assert identity(model) == before
    with model.disable_adapter():
        seen.append(identity(model))
    for scaling in [m.scaling for m in model.modules() if isinstance(getattr(m, "scaling", None), dict)]:
        scaling["first"] *= 2
    seen.append(identity(model))
    model.merge_adapter()
    seen.append(identity(model))
    assert len({one["model's switches"] for one in seen}) == len(seen)
    said = [one["model's adapters"].split(", scaling")[0] for one in seen]
    state = "active_adapters={}, disable_adapters={}, merged_adapters={}".format
    assert said[1] == state(["second"], False, [])
    assert said[3:] == [state(["first"], True, []), state(["first"], False, []), state(["first"], False, ["first"])]
    assert seen[4]["model's adapters"] != before["model's adapters"], "another scaling"
