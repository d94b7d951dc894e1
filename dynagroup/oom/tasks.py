"""The tasks of a job: what is done with a padded batch to generate, to embed, to classify."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from dynagroup.errors import ConfigError
from dynagroup.oom.generate import check_options, generate_in_parts, generation_option, is_data
from dynagroup.oom.jobs import Job, longest_input
from dynagroup.oom.retry import run_with_oom_retry
from dynagroup.oom.split import BatchSplitter
from dynagroup.oom.storage import TEXTS
from dynagroup.validation import check_choice, check_int

if TYPE_CHECKING:
    import torch

__all__ = ["Classification", "Embedding", "Generation", "Pooling"]

Pooling: TypeAlias = Literal["mean", "first", "last"]
_NEW_TOKENS = 128
_OF_A_BATCH = {"inputs", "input_ids", "attention_mask", "inputs_embeds", "position_ids", "past_key_values"}


class Generation(Job):
    """New tokens, as texts. ``given``: what every job is given."""

    kind, mode = TEXTS, "generate"

    def __init__(self, *given: Any) -> None:
        *given, max_new_tokens, self._kwargs = given
        super().__init__(*given)
        model, kwargs = self.model, self._kwargs
        if not callable(getattr(model, "generate", None)):
            raise ConfigError(f"`model` must be one that generates, but a {type(model).__name__} has no generate()")
        check_options(model, kwargs)
        wrong = [name for name, value in kwargs.items() if name in _OF_A_BATCH or is_data(value)]
        if wrong:
            raise ConfigError(f"`{wrong[0]}` belongs to one batch, and a job makes its batches itself; leave it out")
        new = max_new_tokens if max_new_tokens is not None else self._option("max_new_tokens")
        self.new_tokens = check_int("max_new_tokens", _NEW_TOKENS if new is None else new)
        self._each = self._option("num_return_sequences") or 1
        self.copies = max(self._option("num_beams") or 1, self._each)
        self._is_causal = not model.config.is_encoder_decoder
        self.padding_side = "left" if self._is_causal else "right"

    def _option(self, name: str) -> Any:
        return generation_option(name, self.model, self._kwargs)

    @property
    def settings(self) -> dict[str, Any]:
        told = {"max_length": self.max_length, "max_new_tokens": self.new_tokens}
        return {"task": "generate", **told, "arguments": self._kwargs}

    def process(self, batch: dict[str, Any], indices: Sequence[int]) -> list[Any]:
        options = _with_new_tokens(self._kwargs, self.new_tokens)
        if self._option("stop_strings"):
            options["tokenizer"] = self.tokenizer
        multiple = self.budget.pad_to_multiple_of
        done = generate_in_parts(
            self.model, batch, options, learned=self.learned, indices=indices, pad_to_multiple_of=multiple
        )
        tokens = done.sequences[:, batch["input_ids"].shape[1] :] if self._is_causal else done.sequences
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return texts if self._each == 1 else [texts[i : i + self._each] for i in range(0, len(texts), self._each)]


def _with_new_tokens(kwargs: dict[str, Any], max_new_tokens: int) -> dict[str, Any]:
    """In the generation config, where one is given: ``generate`` does not want both."""
    if kwargs.get("generation_config") is None:
        return {**kwargs, "max_new_tokens": max_new_tokens}
    config = copy.deepcopy(kwargs["generation_config"])
    config.max_new_tokens = max_new_tokens
    return {**kwargs, "generation_config": config}


class Forward(Job):
    """A forward pass without gradients; one row of ``outputs`` a text."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._shorten_to(longest_input(self.model, self.tokenizer))

    def outputs(self, batch: dict[str, Any]) -> torch.Tensor:
        """(samples, features) on the model's device."""
        raise NotImplementedError

    def process(self, batch: dict[str, Any], indices: Sequence[int]) -> np.ndarray:
        import torch

        splitter = BatchSplitter(trim="right", pad_to_multiple_of=self.budget.pad_to_multiple_of)
        run_whole = lambda part: self.outputs(part).cpu()  # noqa: E731
        with torch.inference_mode():
            rows = run_with_oom_retry(run_whole, batch, split=splitter, learned=self.learned, indices=indices)
        return torch.cat(rows).float().numpy()

    def _field(self, batch: dict[str, Any], name: str, way_out: str) -> Any:
        """What is needed of the model's output."""
        output = self.model(**batch)
        found = getattr(output, name, None)
        if found is None:
            has = ", ".join(output) if isinstance(output, Mapping) else type(output).__name__
            raise ConfigError(f"this task takes a model whose output has `{name}`, but it has {has}: {way_out}")
        return found


class Embedding(Forward):
    """Hidden states, pooled over a text's tokens."""

    def __init__(self, *given: Any) -> None:
        model, *given, self._pooling, self._normalize = given
        check_choice("pooling", self._pooling, ("mean", "first", "last"))
        inner = _without_head(model)
        if getattr(getattr(inner, "config", None), "is_encoder_decoder", False) and hasattr(inner, "decoder"):
            raise ConfigError(
                f"`model` is a {type(model).__name__}, whose hidden states are its decoder's: use its encoder "
                "(model.get_encoder())"
            )
        super().__init__(inner, *given)

    @property
    def settings(self) -> dict[str, Any]:
        told = {"normalize": int(self._normalize), "max_length": self.max_length}
        return {"task": f"embed {self._pooling}", **told}

    def outputs(self, batch: dict[str, Any]) -> torch.Tensor:
        import torch

        states = self._field(batch, "last_hidden_state", "give the model without its head, as AutoModel loads it")
        pooled = _pool(states, batch["attention_mask"], self._pooling)
        return torch.nn.functional.normalize(pooled, dim=1) if self._normalize else pooled


class Classification(Forward):
    """The logits of a sequence classifier."""

    @property
    def settings(self) -> dict[str, Any]:
        return {"task": "classify", "max_length": self.max_length}

    def outputs(self, batch: dict[str, Any]) -> torch.Tensor:
        way_out = "give the model with a head, as AutoModelForSequenceClassification loads it"
        logits = self._field(batch, "logits", way_out)
        if logits.ndim != 2:
            raise ConfigError(
                f"a classifier's `logits` are (samples, classes), but this model's are {tuple(logits.shape)}: {way_out}"
            )
        return logits.float()


def _without_head(model: Any) -> Any:
    """The part that gives hidden states: a language model's own output is a number for every word of its vocabulary."""
    module = sys.modules.get("transformers.modeling_utils")  # whoever holds such a model has imported it
    inner = _without_adapter(model)
    return inner.base_model if module is not None and isinstance(inner, module.PreTrainedModel) else model


def _without_adapter(model: Any) -> Any:
    """A model of peft without its outer layer, where its adapters are in the layers beneath, which then still run."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    config, tuner = model.active_peft_config, sys.modules["peft.tuners.tuners_utils"].BaseTuner
    around = config.is_prompt_learning or type(model.base_model).forward is not tuner.forward
    return model if around or getattr(config, "alora_invocation_tokens", None) else model.get_base_model()


def _pool(states: torch.Tensor, mask: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    import torch

    num_tokens = mask.sum(1)
    if pooling == "mean":  # summed in float32: bfloat16 cannot count beyond 256
        total = (states * mask.unsqueeze(-1).to(states.dtype)).sum(1, dtype=torch.float32)
        return total / num_tokens.clamp(min=1).unsqueeze(-1)
    position = torch.zeros_like(num_tokens) if pooling == "first" else (num_tokens - 1).clamp(min=0)
    return states[torch.arange(len(states), device=states.device), position].float()
