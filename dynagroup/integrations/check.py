"""Tests how a model architecture treats padded and packed batches, on a small random model on the CPU."""

import copy
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dynagroup.errors import ConfigError
from dynagroup.integrations.packing import packing_collator
from dynagroup.integrations.probe import PROBES, answer, differences
from dynagroup.integrations.varlen import use_varlen_attention
from dynagroup.memory.trace.model import as_config, as_random_model
from dynagroup.memory.traced import TracedMemory
from dynagroup.memory.workload import Workload
from dynagroup.update.split_test import check_loss

NARROW = {
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
SMALL = {
    "vocab_size": 512,
    "intermediate_size": 128,
    "ffn_dim": 128,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "d_ff": 128,
    "n_inner": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "max_position_embeddings": 2048,
}
LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
)
CLOSE = 1e-4  # largest difference by rounding in float32, relative to the largest number


def check_model(model_or_config: Any) -> dict[str, str]:
    """Tests an architecture; returns one line of text for each of ``padding``, ``loss``, ``packed`` and ``memory``.

    Args:
        model_or_config: a transformers config, its name, or a model, whose config is used. No weights are read: the
            test builds a model with the same kinds of layers, but few of them, a small vocabulary, and random weights.

    Raises ConfigError if there is no such config, or no model can be built from it.

    >>> from transformers import LlamaConfig
    >>> check_model(LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2))["loss"]
    'the mean over label tokens'
    """
    torch.manual_seed(0)
    model, found = small_model(getattr(model_or_config, "config", model_or_config)), {}
    for name, ask in QUESTIONS.items():
        try:
            found[name] = ask(model)
        except Exception as error:  # the model's own code may raise anything
            found[name] = f"not known ({type(error).__name__}: {error})".splitlines()[0][:200]
    return found


def small_model(source: Any) -> Any:
    """Builds a small model from a config: few layers, but every kind; a small vocabulary; small widths if the model's
    code allows them. ConfigError: no small model can be built."""
    failed, given = None, as_config(source)
    for sizes in (
        {**SMALL, **NARROW},
        {n: v for n, v in {**SMALL, **NARROW}.items() if n != "head_dim"},
        SMALL,
    ):
        try:
            config = copy.deepcopy(given)
            for part in _parts(config):
                kinds = getattr(part, "layer_types", None) or ()
                count = max(2, *(kinds.index(kind) + 1 for kind in kinds), 0)
                for name, size in {**sizes, **dict.fromkeys(LAYERS, count)}.items():
                    value = getattr(part, name, None)
                    if isinstance(value, int) and (value > size or value < 0):
                        setattr(part, name, size)
                if "layer_types" in vars(part) and kinds:
                    part.layer_types = kinds[:count]
            config.use_cache = (
                False  # with a cache, transformers makes no mask between packed samples
            )
            if (
                getattr(config, "is_encoder_decoder", False)
                and getattr(config, "decoder_start_token_id", None) is None
            ):
                config.decoder_start_token_id = 0
            model: Any = as_random_model(config, Workload(dtype="float32"), torch.device("cpu"))
            _answer(model, torch.tensor([PROBES[0]]))
            return model
        except (
            Exception
        ) as error:  # the model's own code may raise anything; other sizes are tried next
            failed = error
    raise ConfigError(
        f"cannot build a small model of this config that reads only tokens ({failed!r:.200})"
    ) from failed


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict"):
            yield from _parts(value)


def _packed(model: Any) -> str:
    if model.config.is_encoder_decoder:
        return "not possible for encoder-decoders: use the padded layout, with both lengths"
    apart, refused = [], []
    for name in (model.config._attn_implementation, "use_varlen_attention"):
        try:
            packing_collator(use_varlen_attention(model) if apart or refused else model)
            apart.append(name)
        except ConfigError as error:
            refused.append(str(error))
    if apart:
        return f"samples are kept apart with {' or '.join(apart)}: use layout='packed'"
    try:  # recurrent layers need kernels to keep samples apart, and raise without them; Mamba 1 (x_proj) has none
        packing_collator(model, return_seq_idx=True, return_flash_attn_kwargs=True)
    except ConfigError as error:
        if "keep packed sequences apart" in str(error) and not any(
            hasattr(m, "x_proj") for m in model.modules()
        ):
            asks = re.findall(
                r'_with_fallback\("\w+", "(\w+)"',
                inspect.getsource(sys.modules[type(model).__module__]),
            )
            needed = " and ".join(sorted(set(asks)))
            return f"samples are kept apart only by kernels: on a GPU install {needed}, elsewhere use the padded layout"
    return (
        f"samples are not kept apart: use the padded layout ({refused[0].partition(';')[0][:150]})"
    )


def _answer(model: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    decoder = {"decoder_input_ids": ids[:, :2]} if model.config.is_encoder_decoder else {}
    return answer(model, {"input_ids": ids, **more, **decoder})


def _padding(model: Any) -> str:
    """Returns whether a short sample gives the same result alone as when padded beside a longer one."""
    long, short = (torch.tensor([probe]) for probe in PROBES)
    width, missing = short.shape[1], long.shape[1] - short.shape[1]
    padded = torch.nn.functional.pad(short, (0, missing), value=model.config.pad_token_id or 0)
    mask = torch.stack([torch.ones_like(long[0]), torch.tensor([1] * width + [0] * missing)])
    alone, beside = (
        _answer(model, short)[0],
        _answer(model, torch.cat([long, padded]), attention_mask=mask)[1],
    )
    apart, _ = differences(beside[: len(alone)][:width], alone[:width])
    if not apart < CLOSE:
        return f"changes answers by {apart:.1%}: batch equal lengths only"
    if re.search(r"'rope_type': '(longrope|dynamic)'", str(model.config.to_dict())):
        return "changes no answer, but positions depend on the longest sample of a batch: see the page on packing"
    return "changes no answer"


def _loss(model: Any) -> str:
    """Returns how the model's own loss adds up over batches, by the split test."""
    rows = []
    for ids, count in ((PROBES[0], 4), (PROBES[0][::-1], 2)):
        labels = [*ids[: count + 1], *[-100] * (len(ids) - count - 1)]
        rows.append({"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)})
    try:
        found = check_loss(model, lambda step: model(**step.batch).loss, rows)
    except ConfigError:
        return "not the mean over label tokens: pass weigh="
    return LOSSES.get(found, "not known: no gradient")


LOSSES = {
    "tokens": "the mean over label tokens",
    "labels": "the mean over all labels: weigh='labels'",
    "samples": "the mean over samples: weigh='samples'",
    "sum": "a sum over the batch: divide it by step.weight.total",
}


def _memory(model: Any) -> str:
    TracedMemory.of(model.config, "train")
    return "can be traced: use MemoryBudget.from_model"


QUESTIONS: dict[str, Callable[[Any], str]] = {
    "padding": _padding,
    "loss": _loss,
    "packed": _packed,
    "memory": _memory,
}
