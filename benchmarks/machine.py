"""The machine that a benchmark runs on: its clock, its memory, its limit of time, its ranks, and the models it runs.

``cuda``: seconds on the wall, models of real sizes in bfloat16 with random weights (none is downloaded). ``cpu``: CPU seconds of
this process, so that other work does not count. Dry: a GPU's parts on the CPU with sizes that mean nothing, to try them.
"""

import gc
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.record import spread
from dynagroup.device import is_out_of_memory

Name = TypeVar("Name")


@dataclass
class Machine:
    """What every part is handed; it begins nothing that may end after so many minutes."""

    kind: str = "cpu"
    dry: bool = False
    minutes: float = 8.5
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.is_gpu and not torch.cuda.is_available():
            raise SystemExit(
                "no CUDA device here; --dry tries these parts on the CPU, with figures that mean nothing"
            )
        self.device = torch.device(self.kind)
        self.dtype = torch.bfloat16 if self.is_gpu else torch.float32
        if not self.is_gpu:
            torch.set_num_threads(1)
        torch.backends.cuda.enable_cudnn_sdp(
            False
        )  # it takes half a second for every new shape: `gpu steps`

    @property
    def is_gpu(self) -> bool:
        return self.kind == "cuda"

    def left_s(self) -> float:
        """Seconds until nothing more may run."""
        return self.began + 60 * self.minutes - time.monotonic()

    def has(self, seconds: float) -> bool:
        """Whether what may take so long can be begun; dry, everything can."""
        return self.dry or self.left_s() >= seconds

    def seconds(self, run: Callable[[], Any]) -> float:
        self.wait()
        clock = time.perf_counter if self.is_gpu else cpu_seconds
        start = clock()
        run()
        self.wait()
        return clock() - start

    def fits(self, run: Callable[[], Any]) -> bool:
        """Whether it ends without running out of memory; any other error is raised."""
        try:
            run()
            return True
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        if self.is_gpu:  # outside the except block: its traceback kept tensors alive
            torch.cuda.empty_cache()
        return False

    def in_turns(
        self, ways: Mapping[Name, Callable[[], Any]], repeats: int
    ) -> dict[Name, list[float]]:
        """Seconds of each way, round after round: what the machine does beside it meets them all."""
        taken: dict[Name, list[float]] = {name: [] for name in ways}
        for _ in range(repeats):
            for name, way in ways.items():
                taken[name].append(self.seconds(way))
        return taken

    def warm_up(self, seconds: float = 2.0) -> None:
        """Bring a GPU to the clock that it keeps under load, so that what is timed first is not timed slower."""
        until = time.monotonic() + seconds * self.is_gpu
        while time.monotonic() < until:
            square = torch.randn(4096, 4096, device=self.device, dtype=self.dtype)
            self.seconds(lambda square=square: [square @ square for _ in range(20)])
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

    def limit(self, num_bytes: int) -> None:
        """From now on this process fails beyond so many bytes, until :meth:`free`."""
        if self.is_gpu:
            torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / self.total_bytes))

    def peak_bytes(self) -> int:
        """Most bytes allocated since :meth:`free`; 0 where there is no GPU."""
        return torch.cuda.max_memory_allocated() if self.is_gpu else 0

    def held_bytes(self) -> int:
        """Bytes allocated now; 0 where there is no GPU."""
        return torch.cuda.memory_allocated() if self.is_gpu else 0

    @property
    def total_bytes(self) -> int:
        return torch.cuda.get_device_properties(0).total_memory if self.is_gpu else 1 << 30


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


@contextmanager
def noted(failed: dict[str, Any], name: str) -> Iterator[None]:
    """What fails here is written down under this name, so that all else goes on."""
    try:
        yield
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"[:500]


def paired(over: Sequence[float], under: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles of the ratios, turn by turn."""
    return spread([a / b for a, b in zip(over, under, strict=True)])


def on_ranks(number: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """What ``function(*arguments)`` returns on rank 0 of so many processes of one gloo group, a thread each."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_on_rank, (number, folder, function, arguments), nprocs=number)
        return torch.load(Path(folder) / "found.pt", weights_only=False)


def join_group(rank: int, number: int, folder: str | Path) -> None:
    """Become a rank of so many in a gloo group."""
    os.environ["GLOO_SOCKET_IFNAME"] = (
        "lo"  # this process's own; the name of a machine may lead nowhere
    )
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=300), number, rank)


def _on_rank(
    rank: int, number: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    join_group(rank, number, folder)
    found = function(*arguments)
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    dist.destroy_process_group()


SIZES: dict[str, tuple[int, int, int, int, int, int]] = {
    # hidden, layers, heads, kv heads, feed-forward, vocabulary: Qwen/Qwen2.5-0.5B and -1.5B, SmolLM2-135M of their cards
    "135M": (576, 30, 9, 3, 1536, 49152),
    "0.5B": (896, 24, 14, 2, 4864, 151936),
    "1.5B": (1536, 28, 12, 2, 8960, 151936),
    "oom": (1024, 4, 4, 4, 2048, 8192),
    "5M": (256, 4, 4, 4, 1024, 2048),
    "small": (96, 3, 4, 4, 256, 1536),
    "tiny": (8, 1, 1, 1, 8, 64),
    "dry": (32, 2, 2, 1, 32, 64),
}


LORA = " LoRA"
"""Behind a size: adapters are trained, and not the model's weights."""


def base_size(name: str) -> str:
    return name.removesuffix(LORA)


def config_of(name: str, *, dry: bool = False) -> Any:
    from transformers import Qwen2Config

    hidden, layers, heads, kv_heads, inner, vocabulary = SIZES["dry" if dry else base_size(name)]
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def build(name: str, machine: Machine | None = None, *, packed: bool = False, seed: int = 0) -> Any:
    """A model of these sizes with random weights, alike for every call."""
    from transformers import AutoModelForCausalLM

    from dynagroup.integrations.varlen import use_varlen_attention

    machine = Machine() if machine is None else machine
    torch.manual_seed(seed)
    config = config_of(name, dry=machine.dry)
    with machine.device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=machine.dtype, attn_implementation="sdpa"
        )
    if packed:
        use_varlen_attention(model)
    if name.endswith(LORA):
        import peft

        adapters = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, adapters)
    return model
