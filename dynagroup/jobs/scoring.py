"""Scores every text or answer of a dataset by its log-probabilities; logits exist for a few tokens at a time."""

import copy
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from dynagroup.distributed import World
from dynagroup.errors import ConfigError
from dynagroup.jobs.formats import JSON_LINES
from dynagroup.jobs.run import Job, all_results, results_as_they_come
from dynagroup.jobs.texts import (
    Batch,
    Encoded,
    Task,
    TokenizedJob,
    without_wrapper,
)
from dynagroup.memory import MemoryRegressor
from dynagroup.memory.phases import FloatArray
from dynagroup.memory.trace.model import is_encoder
from dynagroup.shapes import TOKENS, BatchShape
from dynagroup.text.measure import by_position, is_pair

_CHUNK = 256  # tokens whose logits exist at a time


def score_dataset(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    answers: Sequence[str] | None = None,
    per_token: bool = False,
    output: str | Path | None = None,
    world: World | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Returns how likely a causal model finds each text, or each answer after its prompt.

    A result is ``{"sum": ..., "mean": ..., "num_tokens": ...}``: the natural logarithms of the probabilities of the scored
    tokens, summed; their mean (None without tokens); and their number. A text's first token has nothing before it and is
    not scored. With answers, tokens are scored from the first one that the prompt alone does not have. The logits of at
    most 256 tokens exist at a time, and memory budgets know this.

    Args:
        model: a causal model of transformers with its head; also a LoRA of ``peft`` on one.
        texts: the texts, or the prompts of ``answers``.
        answers: sequence of str, one per prompt; the model reads ``prompt + answer``. None: the texts are scored.
        per_token: True adds ``"tokens"``, the logarithm of each scored token's probability.
        output: path of a ``.jsonl`` file. ``output``, ``world``, ``options`` and errors are as in
            :func:`generate_dataset`; texts are truncated only to your ``max_length``.

    >>> scores = score_dataset(model, tokenizer, prompts, answers=answers)  # doctest: +SKIP
    >>> [round(score["sum"], 2) for score in scores]  # doctest: +SKIP
    [-12.03, -7.21]
    """
    job = _scoring(model, tokenizer, texts, answers, per_token, options)
    return all_results(job, output, world)


def iter_score(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    answers: Sequence[str] | None = None,
    per_token: bool = False,
    skip: Collection[int] = (),
    **options: Any,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (index, score) like :func:`score_dataset`, longest texts first, without those in ``skip``."""
    job = _scoring(model, tokenizer, texts, answers, per_token, options)
    return results_as_they_come(job, skip)


def _scoring(
    model: Any,
    tokenizer: Any,
    prompts: Any,
    answers: Any,
    per_token: bool,
    options: Mapping[str, Any],
) -> Job:
    scorer = Scorer.of(model)
    texts = by_position(prompts)
    if any(map(is_pair, texts)):
        raise ConfigError("`texts` are pairs; pass the second texts as `answers`")
    if answers is not None:
        texts = _with_answers(texts, by_position(answers, "answers"))
        tokenizer = AnswerTokenizer(tokenizer)

    def run(batch: Batch, encoded: Encoded) -> list[dict[str, object]]:
        starts = encoded.get("num_prompt_tokens", [1] * len(batch["input_ids"]))
        return [_as_result(scores, per_token) for scores in scorer.scores(batch, starts)]

    task = Task(
        run=run,
        settings={"task": "score", "per_token": int(per_token)},
        formats=(JSON_LINES,),
        memory=scorer.memory,
        is_cut_to_model=False,
    )
    return TokenizedJob(model, tokenizer, texts, task, options)


class Scorer(torch.nn.Module):
    """A causal model that computes the log-probabilities of given tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    @classmethod
    def of(cls, model: Any) -> "Scorer":
        """Makes a scorer. ConfigError: the model is not a causal model with its head."""
        inner = without_wrapper(model)
        config = getattr(inner, "config", None)
        is_causal = config is not None and not is_encoder(config) and not config.is_encoder_decoder
        has_head = getattr(inner, "base_model", inner) is not inner
        if not is_causal or not has_head:
            raise ConfigError(
                f"a {type(model).__name__} cannot score texts; give a causal model of transformers with its head, as "
                "AutoModelForCausalLM loads it, without prompt tuning"
            )
        return cls(inner)

    def set_attn_implementation(self, name: str) -> None:
        self.model.set_attn_implementation(name)

    def memory(self) -> "ScoringMemory":
        """Returns the memory of a batch, traced with one full chunk of logits."""
        inputs = _traced_inputs
        return ScoringMemory(
            MemoryRegressor.of_model(self.model, "forward", program=self, inputs=inputs)
        )

    def scores(
        self, batch: Mapping[str, torch.Tensor], starts: Sequence[int]
    ) -> Sequence[torch.Tensor]:
        """Returns the log-probabilities of each text's tokens from number ``starts`` on, float32 on the CPU; a first token
        has none. Texts are padded on the right."""
        ids = batch["input_ids"]
        mask = batch["attention_mask"]
        firsts = torch.tensor([max(start, 1) for start in starts], device=ids.device)
        firsts = torch.nn.functional.pad(firsts, (0, len(ids) - len(firsts)), value=1)
        columns = torch.arange(ids.shape[1], device=ids.device)
        are_scored = (columns >= firsts.unsqueeze(1)) & mask.bool()
        places = are_scored.flatten().nonzero()[:, 0]
        scores = self(ids, mask, places.split(_CHUNK))
        return scores.cpu().split(are_scored.sum(dim=1).tolist())

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        chunks: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Returns the log-probabilities of the tokens at these places in the flat batch, given those before them."""
        body = self.model.base_model
        outputs = body(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        states = outputs.last_hidden_state.flatten(0, 1)
        ids = input_ids.flatten()
        scores = []
        replay = _Replay(outputs, body)
        name = self.model.base_model_prefix
        # The model's own forward pass makes logits of the states, with any scaling or capping that it has. A compiled one
        # would be compiled again for each replay.
        setattr(self.model, name, replay)
        try:
            with torch.compiler.set_stance("force_eager"):
                for places in chunks:
                    targets = ids[places]
                    replay.states = states[places - 1].unsqueeze(0)
                    logits = self.model(input_ids=targets.unsqueeze(0), use_cache=False).logits[0]
                    losses = cross_entropy(logits.float(), targets, reduction="none")
                    scores.append(-losses)
        finally:
            setattr(self.model, name, body)
        return torch.cat(scores)


@dataclass(frozen=True)
class ScoringMemory:
    """The memory of a batch without that of the smallest batch, which is mostly a chunk of logits that all batches need."""

    traced: MemoryRegressor

    @property
    def fingerprint(self) -> str:
        return f"scoring-{self.traced.fingerprint}"

    def relative(self, shape: BatchShape, baseline: BatchShape, /) -> FloatArray:
        phases = self.traced.workload.phases
        if phases is None:
            return self.traced.relative(shape, baseline)
        smallest = phases.bytes(BatchShape.of(1, 1))
        beyond = phases.bytes(shape) - smallest
        return beyond / np.maximum(phases.bytes(baseline) - smallest, 1.0)


class _Replay(torch.nn.Module):
    """Stands in the place of the layers, and returns states that they have computed."""

    def __init__(self, outputs: Any, body: torch.nn.Module) -> None:
        super().__init__()
        self._outputs = outputs
        self._bodies = [body]  # in a list, so that it is no submodule
        self.states: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        # Some models run a part of the layers' module (OPT: its decoder), or read its settings.
        value = getattr(self._bodies[0], name)
        return self if isinstance(value, torch.nn.Module) else value

    def forward(self, *args: object, **kwargs: object) -> Any:
        outputs = copy.copy(self._outputs)
        outputs.last_hidden_state = self.states
        return outputs


class AnswerTokenizer:
    """A tokenizer of prompts with their answers: joins the texts, and counts the tokens that are the prompt's."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(
        self,
        prompts: list[str],
        answers: list[str],
        *,
        truncation: bool = False,
        max_length: int | None = None,
    ) -> Any:
        whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        encoded = self._tokenizer(whole, truncation=truncation, max_length=max_length)
        of_prompts = self._tokenizer(prompts)["input_ids"]
        encoded["num_prompt_tokens"] = list(map(_num_equal, of_prompts, encoded["input_ids"]))
        return encoded


def _num_equal(prompt: Sequence[int], whole: Sequence[int]) -> int:
    """Returns how many tokens are the same from the start. A token that the answer has changed is the answer's."""
    for place, (token, other) in enumerate(zip(prompt, whole, strict=False)):
        if token != other:
            return place
    return min(len(prompt), len(whole))


def _with_answers(prompts: Sequence[str], answers: Sequence[str]) -> list[tuple[str, str]]:
    """Returns pairs of prompt and answer. ConfigError: there is not one answer per prompt."""
    if len(prompts) != len(answers):
        raise ConfigError(
            f"`answers` has {len(answers)} texts for {len(prompts)} prompts; give one per prompt"
        )
    return list(zip(prompts, answers, strict=True))


def _as_result(scores: torch.Tensor, per_token: bool) -> dict[str, object]:
    """Returns the result of one text, as values for JSON."""
    values = scores.tolist()
    total = math.fsum(values)
    result: dict[str, object] = {"sum": total, "mean": None, "num_tokens": len(values)}
    if values:
        result["mean"] = total / len(values)
    if per_token:
        result["tokens"] = values
    return result


def _traced_inputs(
    model: object, num_samples: int, longest: Mapping[str, int]
) -> dict[str, object]:
    """Returns a batch with one full chunk, of a tensor as large as all places and scores: 16 bytes for each token."""
    ids = torch.zeros(num_samples, longest[TOKENS], dtype=torch.long)
    places = torch.zeros(2 * ids.numel() + _CHUNK, dtype=torch.long)
    chunks = [places[:_CHUNK]]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "chunks": chunks}
