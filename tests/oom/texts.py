"""A tokenizer of a few words, a small model, and texts of many lengths."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests import models

WORDS = [f"w{i}" for i in range(26)]
TEXTS = [" ".join(np.random.default_rng(i).choice(WORDS, size=1 + (7 * i) % 13)) for i in range(40)]


def small_tokenizer() -> Any:
    return models.word_tokenizer(WORDS, "[PAD]", "[BOS]", "[EOS]", "[UNK]")


def small_llama() -> Any:
    from transformers import LlamaForCausalLM

    torch.manual_seed(6)
    config = models.llama(vocab=30, layers=3, inner=16, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return models.sharp(LlamaForCausalLM(config).eval())


def save_encoder(folder: Path, *, max_seq_length: int = 256, pooling: str = "pooling_mode_mean_tokens") -> Any:
    """A small BERT in a folder as sentence-transformers lays it out; returns the model."""
    from transformers import BertModel

    torch.manual_seed(0)
    model = BertModel(models.bert(vocab=30, inner=16)).eval()
    model.save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_seq_length}))
    (folder / "1_Pooling").mkdir()
    said = {"word_embedding_dimension": 16, "pooling_mode_cls_token": False, pooling: True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(said))
    return model


def adapted(model: Any, config: Any, *names: str) -> Any:
    """The model with adapters of this kind; the first is active."""
    import peft

    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # peft asks transformers by an old name
        model = peft.get_peft_model(model, config, adapter_name=(names or ("default",))[0])
        for name in names[1:]:
            model.add_adapter(name, config)
        model.set_adapter((names or ("default",))[0])
    return model.eval()
