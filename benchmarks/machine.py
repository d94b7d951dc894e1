"""The machine that a benchmark runs on: its clock, its memory, its limit of time, and the models it runs.

``--device cuda``: seconds on the wall, models of real sizes in bfloat16 with random weights (nothing is downloaded).
``--device cpu``: CPU seconds of this process, so that other work does not count. ``--dry``: a GPU's parts on the CPU with sizes
that mean nothing, to try them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["SIZES", "Machine", "build", "config_of", "lora"]


@dataclass
class Machine:
    """What every part is handed.

    Args:
        kind: "cpu" or "cuda".
        minutes: a part begins nothing that may end after so many.
    """

    kind: str = "cpu"
    dry: bool = False
    minutes: float = 8.5
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.is_gpu and not torch.cuda.is_available():
            raise SystemExit("no CUDA device here; --dry tries these parts on the CPU, with figures that mean nothing")
        self.device = torch.device(self.kind)
        self.dtype = torch.bfloat16 if self.is_gpu else torch.float32

    @property
    def is_gpu(self) -> bool:
        return self.kind == "cuda"

    def left_s(self) -> float:
        """Seconds until nothing more may run."""
        return self.began + 60 * self.minutes - time.monotonic()

    def seconds(self, run: Callable[[], Any]) -> float:
        """How long it takes, until the device is done."""
        self.wait()
        clock = time.perf_counter if self.is_gpu else time.process_time
        start = clock()
        run()
        self.wait()
        return clock() - start

    def warm_up(self, seconds: float = 2.0) -> None:
        """Bring the device to the clock that it keeps under load, so that what is timed first is not timed slower."""
        if not self.is_gpu:
            return
        square = torch.randn(4096, 4096, device=self.device, dtype=self.dtype)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for _ in range(20):
                square @ square
            self.wait()
        del square
        self.free()

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def free(self) -> None:
        """Give unused memory back, forget earlier peaks, and lift a limit that a part has set."""
        if self.is_gpu:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(1.0)
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """Most bytes allocated since :meth:`free`; 0 where there is no GPU."""
        return torch.cuda.max_memory_allocated() if self.is_gpu else 0

    @property
    def total_bytes(self) -> int:
        return torch.cuda.get_device_properties(0).total_memory if self.is_gpu else 1 << 30


SIZES: dict[str, dict[str, int]] = {
    # Qwen/Qwen2.5-0.5B and -1.5B; SmolLM2-135M: hidden, layers, heads, kv heads, feed-forward, vocabulary of their cards
    "135M": {"hidden": 576, "layers": 30, "heads": 9, "kv": 3, "ffn": 1536, "vocabulary": 49152},
    "0.5B": {"hidden": 896, "layers": 24, "heads": 14, "kv": 2, "ffn": 4864, "vocabulary": 151936},
    "1.5B": {"hidden": 1536, "layers": 28, "heads": 12, "kv": 2, "ffn": 8960, "vocabulary": 151936},
    "dry": {"hidden": 32, "layers": 1, "heads": 2, "kv": 1, "ffn": 32, "vocabulary": 64},
    "small": {"hidden": 96, "layers": 3, "heads": 4, "kv": 4, "ffn": 256, "vocabulary": 1536},
}


def config_of(name: str, *, dry: bool = False) -> Any:
    from transformers import Qwen2Config

    s = SIZES["dry" if dry else name]
    return Qwen2Config(
        vocab_size=s["vocabulary"], hidden_size=s["hidden"], num_hidden_layers=s["layers"], num_attention_heads=s["heads"],
        num_key_value_heads=s["kv"], intermediate_size=s["ffn"], max_position_embeddings=32768, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def build(name: str, machine: Machine, *, attention: str = "sdpa", train: bool = True) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = config_of(name, dry=machine.dry)
    with machine.device:
        model = AutoModelForCausalLM.from_config(config, dtype=machine.dtype, attn_implementation="sdpa")
    if attention == "varlen":
        from dynagroup.integrations.varlen import use_varlen_attention

        use_varlen_attention(model)
    return model.train(train)


def lora(model: Any) -> Any:
    """Rank 16 on the attention and feed-forward projections, as common recipes have it."""
    from peft import LoraConfig, get_peft_model

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=names, task_type="CAUSAL_LM"))
