"""Embeds texts with a ``SentenceTransformer``, which does all that its folder says."""

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dynagroup.errors import ConfigError
from dynagroup.jobs.formats import RAGGED, VECTORS
from dynagroup.jobs.identity import described_setting, identity_of_model, identity_of_texts
from dynagroup.jobs.texts import TextJob
from dynagroup.memory import MemoryRegressor
from dynagroup.memory.protocols import MemoryModel, PaddedTokens
from dynagroup.plan.cost import Work
from dynagroup.validation import fetch

_CHUNK = 256  # texts that are tokenized together to measure them


def is_sentence_transformer(model: object) -> bool:
    package = sys.modules.get("sentence_transformers")  # whoever has such a model has imported it
    return package is not None and isinstance(model, package.SentenceTransformer)


class SentenceJob(TextJob):
    """Runs ``model.encode`` on planned batches: its prompt, tokenizer, modules and truncation are its own."""

    def __init__(
        self,
        model: Any,
        texts: Any,
        options: Mapping[str, Any],
        *,
        normalize: bool,
        per_token: bool,
    ) -> None:
        super().__init__(texts, options)
        if self._options.max_length is not None or self._options.shapes is not None:
            raise ConfigError(
                "`max_length` and `shapes` are not for a SentenceTransformer; set model.max_seq_length"
            )
        if per_token and normalize:
            raise ConfigError(
                "`normalize` is for one vector per text; leave it out with pooling=None"
            )
        self._model = model
        self._prompt = model.prompts.get(model.default_prompt_name) or ""
        self._encoder = getattr(model, "transformers_model", None)  # None: it is of another kind
        self._normalize = normalize
        self._is_per_token = per_token
        self.formats = RAGGED if per_token else (VECTORS,)

    @property
    def _output(self) -> str:
        return "token_embeddings" if self._is_per_token else "sentence_embedding"

    def run(self, items: list[str]) -> list[np.ndarray]:
        with self.attention_kernels():
            results = self._model.encode(
                items,
                batch_size=len(items),
                normalize_embeddings=self._normalize,
                show_progress_bar=False,
                convert_to_numpy=False,
                output_value=self._output,
            )
        # One copy from the device: a copy for each text would wait for the device each time.
        if not self._is_per_token:
            return list(torch.stack(results).float().cpu().numpy())
        ends = np.cumsum([len(states) for states in results])
        on_cpu = torch.cat(results).float().cpu().numpy()
        return [states.copy() for states in np.split(on_cpu, ends[:-1])]

    def _memory(self) -> MemoryModel:
        if self._encoder is None:
            return PaddedTokens()
        return MemoryRegressor.of_model(self._encoder, "forward")

    def _work(self) -> Work:
        return Work.of_known(self._encoder, device=self._model.device)

    def _lengths(self) -> NDArray[np.int32]:
        """Returns the tokens of each text with the prompt; of models that tell none, its characters."""
        for index, text in enumerate(self.items):
            if not isinstance(text, str):
                raise ConfigError(f"text {index} must be a string, but is {text!r:.200}")
        # The model pads what it tokenizes together, so texts of similar length are measured together.
        order = np.argsort([len(text) for text in self.items], kind="stable")
        lengths = np.zeros(len(self.items), np.int32)
        for start in range(0, len(order), _CHUNK):
            chunk = order[start : start + _CHUNK]
            texts = [self._prompt + text for text in fetch(self.items, chunk.tolist())]
            lengths[chunk] = self._lengths_of(texts)
        return lengths

    def _lengths_of(self, texts: list[str]) -> list[int]:
        features = self._model.preprocess(texts)
        if "attention_mask" in features:
            return features["attention_mask"].sum(dim=1).tolist()
        if "cu_seq_lens_q" in features:  # flash attention: texts end to end
            return np.diff(features["cu_seq_lens_q"]).tolist()
        if "offsets" in features:  # static embeddings: texts end to end
            ends = [*features["offsets"].tolist(), len(features["input_ids"])]
            return np.diff(ends).tolist()
        return [len(text) for text in texts]

    def identity(self) -> dict[str, object]:
        model = self._model
        modules = []
        for module in model:
            modules.append((type(module).__name__, module.get_config_dict()))
        settings = {
            "task": "embed by SentenceTransformer.encode",
            "output_value": self._output,
            "prompt": self._prompt,
            "modules": modules,
            "max_seq_length": model.max_seq_length,
            "truncate_dim": model.truncate_dim,
            "normalize": int(self._normalize),
        }
        identity = identity_of_model(model)
        config = None if self._encoder is None else self._encoder.config
        identity["model's config"] = described_setting(config)
        of_texts = identity_of_texts(model.tokenizer, self.items, settings, self._options.identity)
        return identity | of_texts
