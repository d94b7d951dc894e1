"""Embeds texts with a ``SentenceTransformer``, which does all that its folder says."""

import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.errors import ConfigError
from dynagroup.jobs.formats import VECTORS
from dynagroup.jobs.identity import described_setting, identity_of_model, identity_of_texts
from dynagroup.jobs.run import Job, Plan
from dynagroup.jobs.texts import JobOptions, budget_for
from dynagroup.memory import MemoryRegressor
from dynagroup.memory.protocols import MemoryModel, PaddedTokens
from dynagroup.plan.cost import Work
from dynagroup.shapes import TOKENS
from dynagroup.text.measure import by_position
from dynagroup.validation import check_identity

_CHUNK = 256  # texts that are tokenized together to measure them


def is_sentence_transformer(model: Any) -> bool:
    package = sys.modules.get("sentence_transformers")  # whoever has such a model has imported it
    return package is not None and isinstance(model, package.SentenceTransformer)


class SentenceJob:
    """Runs ``model.encode`` on planned batches: its prompt, tokenizer, modules and truncation are its own."""

    def __init__(self, model: Any, texts: Any, normalize: bool, options: JobOptions) -> None:
        if options.max_length is not None or options.shapes is not None:
            raise ConfigError(
                "`max_length` and `shapes` are not for a SentenceTransformer; set model.max_seq_length"
            )
        self._model = model
        self._texts = by_position(texts)
        self._prompt = model.prompts.get(model.default_prompt_name) or ""
        self._encoder = getattr(model, "transformers_model", None)  # None: it is of another kind
        self._normalize = normalize
        self._options = options

    def job(self) -> Job:
        return Job(
            items=self._texts,
            run=self._run,
            plan=lambda: self._plan,
            identity=self._identity,
            format=VECTORS,
            learned=self._options.learner(),
            progress=self._options.progress,
        )

    def _run(self, texts: list[str]) -> Sequence[np.ndarray]:
        return self._model.encode(
            texts,
            batch_size=len(texts),
            normalize_embeddings=self._normalize,
            show_progress_bar=False,
        ).astype(np.float32)

    @cached_property
    def _plan(self) -> Plan:
        lengths = self._lengths()
        return Plan(
            lengths={TOKENS: lengths},
            budget=budget_for(lengths, self._options, self._memory),
            work=Work.of_known(self._encoder, device=self._model.device),
        )

    def _memory(self) -> MemoryModel:
        if self._encoder is None:
            return PaddedTokens()
        return MemoryRegressor.of_model(self._encoder, "forward")

    def _lengths(self) -> NDArray[np.int32]:
        """Returns the tokens of each text with the prompt; of models that tell none, its characters."""
        lengths: list[int] = []
        for start in range(0, len(self._texts), _CHUNK):
            texts = [self._prompt + text for text in self._texts[start : start + _CHUNK]]
            features = self._model.preprocess(texts)
            if "attention_mask" in features:
                lengths.extend(features["attention_mask"].sum(dim=1).tolist())
            elif "offsets" in features:  # static embeddings: texts end to end
                ends = [*features["offsets"].tolist(), len(features["input_ids"])]
                lengths.extend(np.diff(ends).tolist())
            else:
                lengths.extend(len(text) for text in texts)
        return np.array(lengths, np.int32)

    def _identity(self) -> dict[str, Any]:
        model = self._model
        modules = []
        for module in model:
            modules.append((type(module).__name__, module.get_config_dict()))
        settings = {
            "task": "embed by SentenceTransformer.encode",
            "prompt": self._prompt,
            "modules": modules,
            "max_seq_length": model.max_seq_length,
            "truncate_dim": model.truncate_dim,
            "normalize": int(self._normalize),
        }
        identity = identity_of_model(model)
        identity["model's config"] = described_setting(getattr(self._encoder, "config", None))
        of_texts = identity_of_texts(
            model.tokenizer, self._texts, settings, check_identity(self._options.identity)
        )
        return identity | of_texts
