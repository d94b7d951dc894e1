"""Tests how a model architecture treats padded and packed batches, on a shallow model with random weights on the CPU."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from dynagroup.errors import ConfigError
from dynagroup.integrations.packing import packing_collator
from dynagroup.integrations.probe import PROBES, answer, relative_difference
from dynagroup.integrations.varlen import use_varlen_attention
from dynagroup.memory.trace.audio import (
    convolutions,
    reads_sound,
    shortest_input,
    sound_inputs,
)
from dynagroup.memory.trace.model import as_config, as_random_model
from dynagroup.memory.traced import TracedMemory
from dynagroup.memory.workload import Workload
from dynagroup.update.loss_check import check_loss

FEWEST_LAYERS = 2
SMALL = {
    "vocab_size": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 16,
    "num_local_experts": 16,
    "n_routed_experts": 16,
}
"""Largest values of settings that do not change what is tested. Layers keep their widths."""
LONG_SOUND = 40  # positions of the model, of which the shorter sound has
SHORT_SOUND = 23
CLOSE = 1e-4  # largest difference by rounding in float32, relative to all values


def check_model(model_or_config: object) -> dict[str, str]:
    """Tests an architecture; returns one line of text for each of ``padding``, ``loss``, ``packed`` and ``memory``.

    Args:
        model_or_config: a transformers config, its name, or a model, whose config is used. No weights are read: the
            test builds a model of two layers (or of one of each kind) of full width, with random weights.

    Raises ConfigError if there is no such config, or no model can be built from it.

    >>> from transformers import LlamaConfig
    >>> check_model(LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2))["loss"]
    'the mean over label tokens'
    """
    torch.manual_seed(0)
    config: Any = model_or_config
    if isinstance(model_or_config, torch.nn.Module):
        config = model_or_config.config
    config = as_config(config)
    model: Any = as_random_model(shallow(config), Workload(dtype="float32"), torch.device("cpu"))
    answers = {}
    for name, question in QUESTIONS.items():
        try:
            answers[name] = question(model)
        except Exception as error:  # the model's own code may raise anything
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            answers[name] = f"not known ({reason:.180})"
    return answers


def shallow(config: PretrainedConfig) -> PretrainedConfig:
    """Returns a copy of a config with few layers, but one of every kind; and with few words and experts."""
    config = copy.deepcopy(config)
    text: Any = config.get_text_config()
    kinds = list(getattr(text, "layer_types", None) or [])
    num_layers = max([FEWEST_LAYERS, *(kinds.index(kind) + 1 for kind in kinds)])
    for name, largest in {"num_hidden_layers": num_layers, **SMALL}.items():
        value = getattr(text, name, None)
        if isinstance(value, int) and value > largest:
            setattr(text, name, largest)
    if "layer_types" in vars(text):  # else it follows from other settings
        text.layer_types = kinds[:num_layers]
    text.use_cache = False  # with a cache, transformers makes no mask between packed samples
    if config.is_encoder_decoder and config.decoder_start_token_id is None:
        config.decoder_start_token_id = 0
    return config


def _padding(model: PreTrainedModel) -> str:
    """Returns whether a short sample gives the same result alone as when padded beside a longer one."""
    batch, alone = _sounds(model) if reads_sound(model) else _texts(model)
    if model.config.is_encoder_decoder:
        words = torch.tensor([PROBES[0][:2], PROBES[1][:2]])
        batch["decoder_input_ids"] = words
        alone["decoder_input_ids"] = words[1:]
    wanted = answer(model, alone)[0]
    difference = relative_difference(answer(model, batch)[1, : len(wanted)], wanted)
    if difference < CLOSE:
        return "changes no answer"
    return f"changes answers by {difference:.1%}: batch equal lengths only"


def _texts(model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns two texts of unequal length in a batch, and the shorter one alone."""
    long, short = PROBES
    missing = len(long) - len(short)
    ids = torch.tensor([long, short + (model.config.pad_token_id or 0,) * missing])
    mask = torch.tensor([[1] * len(long), [1] * len(short) + [0] * missing])
    return {"input_ids": ids, "attention_mask": mask}, {"input_ids": torch.tensor([short])}


def _sounds(model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns two sounds of unequal length in a batch with a mask, and the shorter one alone; both noise."""
    layers = convolutions(model.config)
    batch = sound_inputs(model, 2, shortest_input(layers, LONG_SOUND))
    values = batch[model.main_input_name].normal_()
    if "attention_mask" not in batch:
        return batch, {model.main_input_name: values[1:]}
    num_real = shortest_input(layers, SHORT_SOUND)
    values[1, num_real:] = 0.0
    batch["attention_mask"][1, num_real:] = 0
    return batch, {name: tensor[1:, :num_real] for name, tensor in batch.items()}


def _loss(model: PreTrainedModel) -> str:
    """Returns how the model's own loss adds up over batches, by the split test."""
    rows = []
    for ids, num_labels in ((PROBES[0], 5), (PROBES[0][::-1], 3)):
        labels = ids[:num_labels] + (-100,) * (len(ids) - num_labels)
        row = {"input_ids": torch.tensor(ids)}
        if reads_sound(model):
            sounds = sound_inputs(model, 1, shortest_input(convolutions(model.config), LONG_SOUND))
            sounds[model.main_input_name].normal_()
            row = {name: tensor[0] for name, tensor in sounds.items()}
        rows.append({**row, "labels": torch.tensor(labels)})
    rule = check_loss(model, lambda step: model(**step.batch).loss, rows)
    return LOSSES.get(rule, "not known: no gradient")


LOSSES = {
    "tokens": "the mean over label tokens",
    "labels": "the mean over all labels: weigh='labels'",
    "samples": "the mean over samples: weigh='samples'",
    "sum": "a sum over the batch: divide it by step.weight.total",
}


def _packed(model: PreTrainedModel) -> str:
    """Returns with which attention samples that are packed give the results that each gives alone."""
    if model.config.is_encoder_decoder:
        return "not possible for encoder-decoders: use the padded layout, with both lengths"
    if reads_sound(model):
        return "not possible for models of sound: use the padded layout"
    attentions = []
    reason = ""
    try:
        packing_collator(model)
        attentions.append(model.config._attn_implementation)
    except ConfigError as error:
        reason = str(error).partition(";")[0]
    try:
        packing_collator(use_varlen_attention(model))
        attentions.append("use_varlen_attention")
    except ConfigError as error:
        reason = reason or str(error)
    if attentions:
        return f"samples are kept apart with {' or '.join(attentions)}: use layout='packed'"
    return f"samples are not kept apart: use the padded layout ({reason:.150})"


def _memory(model: PreTrainedModel) -> str:
    try:
        TracedMemory.of(model.config, "train")
    except ConfigError:
        return "cannot be traced: use ProfiledMemory.fit(simulate(...))"
    return "can be traced: use MemoryBudget.from_model"


QUESTIONS: dict[str, Callable[[PreTrainedModel], str]] = {
    "padding": _padding,
    "loss": _loss,
    "packed": _packed,
    "memory": _memory,
}
