"""Memory on a GPU of models that are no plain decoder, and of a loop that keeps the outputs or frees them: peaks, simulated and
measured."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks import memory
from benchmarks.machine import Machine, config_of, noted
from benchmarks.record import table
from dynagroup.device import CudaDevice, Device
from dynagroup.integrations.varlen import use_varlen_attention
from dynagroup.jobs.scoring import Scorer
from dynagroup.memory import Measurement, Workload, measure, simulate
from dynagroup.memory.phases import Layout, MakeInputs
from dynagroup.memory.trace.program import static_bytes
from dynagroup.shapes import BatchShape
from regressor.measure_gpu import DryDevice, Row, Shapes, row_of

SECONDS = 25
"""That one kind of model may take, on a machine that is slow at launching kernels."""


def pixels(model: Any, num_samples: int, _: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Images of the size that the model reads, and their classes."""
    config = model.config
    side = config.image_size
    dtype = next(model.parameters()).dtype
    return {
        "pixel_values": torch.zeros(num_samples, config.num_channels, side, side, dtype=dtype),
        "labels": torch.zeros(num_samples, dtype=torch.long),
    }


def as_built(model: Any) -> Any:
    return model


def adapted(model: Any) -> Any:
    """With adapters of rank 16 on every linear layer."""
    import peft

    config = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def checkpointed(model: Any) -> Any:
    """Layers are run again to their end, and not as far as the last stored tensor."""
    model.gradient_checkpointing_enable({"use_reentrant": True})
    return model


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of model, and the batches of its training steps."""

    config: str | None = None
    """Class of its config; None: a Qwen2 of the sizes of Qwen2.5-0.5B."""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    dry_sizes: Mapping[str, Any] = field(default_factory=dict)
    """Take the place of ``sizes`` in a dry run."""
    head: str = "AutoModelForCausalLM"
    shapes: Shapes
    """Samples, and tokens of each: a small batch and a large one."""
    prepared: Callable[[Any], Any] = as_built
    inputs: MakeInputs | None = None
    layout: Layout = "padded"
    needs: str = "transformers"
    """A package without which the kind is left out."""


GEMMA3 = {
    "vocab_size": 262144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
}
"""Of Gemma 3 1B."""
QWEN3_MOE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 32,
    "num_experts_per_tok": 8,
}
"""Of Qwen3 30B-A3B, with a quarter of the layers and of the experts."""
VIT = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_labels": 1000,
}
"""Of ViT Large."""
WHISPER = {
    "d_model": 768,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072,
}
"""Of Whisper Small."""
MAMBA2 = {
    "vocab_size": 50288,
    "hidden_size": 1024,
    "num_hidden_layers": 48,
    "state_size": 128,
    "num_heads": 32,
    "head_dim": 64,
    "n_groups": 1,
}
"""Of Mamba 2 370M."""
DRY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
DRY_BERT = {**DRY, "intermediate_size": 32, "pad_token_id": 0}
DRY_GEMMA3 = {
    **DRY,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
    "sliding_window": 8,
}
DRY_MOE = {
    **DRY,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
DRY_VIT = {**DRY, "intermediate_size": 32, "image_size": 32}
DRY_WHISPER = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_source_positions": 20,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "decoder_start_token_id": 1,
}
DRY_MAMBA2 = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 8,
    "num_heads": 4,
    "head_dim": 16,
    "chunk_size": 8,
}
BERT_HEAD = "AutoModelForMaskedLM"
VIT_HEAD = "AutoModelForImageClassification"
WHISPER_HEAD = "AutoModelForSpeechSeq2Seq"
KINDS: dict[str, Kind] = {}
"""By name; a run's batches reach 4 to 30 GB."""
KINDS["modernbert"] = Kind(
    config="ModernBertConfig", dry_sizes=DRY_BERT, head=BERT_HEAD, shapes=((8, 512), (16, 1024))
)
KINDS["gemma3"] = Kind(
    config="Gemma3TextConfig", sizes=GEMMA3, dry_sizes=DRY_GEMMA3, shapes=((2, 512), (4, 1024))
)
KINDS["qwen3_moe"] = Kind(
    config="Qwen3MoeConfig", sizes=QWEN3_MOE, dry_sizes=DRY_MOE, shapes=((2, 512), (4, 1024))
)
KINDS["vit"] = Kind(
    config="ViTConfig",
    sizes=VIT,
    dry_sizes=DRY_VIT,
    head=VIT_HEAD,
    shapes=((16, 197), (128, 197)),
    inputs=pixels,
)
KINDS["whisper"] = Kind(
    config="WhisperConfig",
    sizes=WHISPER,
    dry_sizes=DRY_WHISPER,
    head=WHISPER_HEAD,
    shapes=((4, 64), (16, 448)),
)
KINDS["lora"] = Kind(shapes=((4, 512), (12, 512)), prepared=adapted, needs="peft")
KINDS["reentrant"] = Kind(shapes=((4, 512), (8, 1024)), prepared=checkpointed)
KINDS["varlen"] = Kind(shapes=((4, 512), (8, 1024)), prepared=use_varlen_attention, layout="packed")
KINDS["mamba2"] = Kind(
    config="Mamba2Config", sizes=MAMBA2, dry_sizes=DRY_MAMBA2, shapes=((1, 256), (2, 512))
)
DRY_SHAPES: Shapes = ((1, 16), (2, 24))
SCORED: Shapes = ((16, 512), (32, 2048))
LOOPS: Shapes = ((8, 512), (36, 512), (148, 128), (2, 8192))
"""Batches of a loop that keeps its outputs, and of one that frees them. All but the first are the largest that the part `fits`
found under 64 GiB."""


def measured(machine: Machine) -> Iterator[dict[str, Any]]:
    """Training steps of every kind of model, scoring, and steps with outputs kept and freed; figures after each."""
    figures: dict[str, Any] = {"rows": [], "left_out": [], "failed": {}}
    device = DryDevice() if machine.dry else CudaDevice()
    runs: dict[str, Callable[[], list[Row]]] = {"outputs": partial(_of_loops, machine, device)}
    for name, kind in KINDS.items():
        if _is_installed(kind.needs):
            runs[name] = partial(_of_kind, name, kind, machine, device)
        else:
            figures["left_out"].append(name)
    runs["scoring"] = partial(_of_scoring, machine, device)
    for name, run in runs.items():
        if not machine.has(SECONDS):
            figures["left_out"].append(name)
            continue
        with noted(figures["failed"], name):
            figures["rows"] += run()
        machine.free()
        yield figures
    yield figures


def _is_installed(package: str) -> bool:
    try:
        import_module(package)
    except ImportError:
        return False
    return True


def model_of(kind: Kind, *, dry: bool, device: torch.device) -> Any:
    """A model of this kind, with random weights in bfloat16."""
    import transformers as hf

    if kind.config is None:
        config = config_of("0.5B", dry=dry)
    else:
        sizes = {**kind.sizes, **kind.dry_sizes} if dry else kind.sizes
        config = getattr(hf, kind.config)(**sizes)
    config.use_cache = False  # as a Trainer trains it
    with device:
        model = getattr(hf, kind.head).from_config(config, dtype=torch.bfloat16)
    return kind.prepared(model)


def _of_kind(name: str, kind: Kind, machine: Machine, device: Device) -> list[Row]:
    model = model_of(kind, dry=machine.dry, device=device.device)
    workload = Workload.from_model(model, "train", trace=False, layout=kind.layout)
    shapes = DRY_SHAPES if machine.dry else kind.shapes
    return _rows(name, model, workload, shapes, device, inputs=kind.inputs)


def _rows(
    name: str,
    model: Any,
    workload: Workload,
    shapes: Shapes,
    device: Device,
    *,
    inputs: MakeInputs | None = None,
) -> list[Row]:
    real = measure(model, workload, shapes, inputs=inputs, device=device)
    simulated = simulate(model, workload, shapes, inputs=inputs)
    rows = []
    for measurement, simulation in zip(real, simulated, strict=True):
        rows.append(row_of(name, workload, measurement, simulation))
    return rows


class Scoring(torch.nn.Module):
    """Scores all texts of a batch, as a job does."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self.scorer = scorer
        self.config = scorer.config

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        batch = {"input_ids": input_ids, "attention_mask": attention_mask}
        return self.scorer.scores(batch, [1] * len(input_ids))


def _of_scoring(machine: Machine, device: Device) -> list[Row]:
    """Scoring, against the trace that its own budget is made of."""
    shapes = DRY_SHAPES if machine.dry else SCORED
    model = model_of(Kind(shapes=shapes), dry=machine.dry, device=device.device)
    scorer = Scorer.of(model.eval())
    workload = scorer.memory().traced.workload
    phases = workload.phases
    if phases is None:
        raise RuntimeError("scoring was not traced")
    real = measure(Scoring(scorer), workload.replace(phases=None), shapes, device=device)
    static = static_bytes(scorer, workload)
    rows = []
    for measurement in real:
        [batch_bytes] = phases.bytes(
            BatchShape.of(measurement.num_samples, dict(measurement.longest))
        )
        traced = Measurement(
            measurement.num_samples, measurement.longest, static, round(batch_bytes)
        )
        rows.append(row_of("scoring", real.workload, measurement, traced))
    return rows


def _of_loops(machine: Machine, device: Device) -> list[Row]:
    """Training steps of a loop that keeps the outputs in the backward pass, and of one that frees them; and what is alive on
    the device when most is, in the first batch."""
    shapes = DRY_SHAPES if machine.dry else LOOPS
    model = model_of(Kind(shapes=shapes), dry=machine.dry, device=device.device)
    rows: list[Row] = []
    for loop, keeps_outputs in (("kept", True), ("freed", False)):
        workload = Workload.from_model(
            model,
            "train",
            trace=False,
            keeps_outputs=keeps_outputs,
            optimizer_bytes=0.0,  # no step is taken, so the device has none reserved
        )
        of_loop = _rows("qwen2", model, workload, shapes, device)
        with noted(of_loop[0], "not recorded"), recorded(device) as events:
            measure(model, workload, shapes[:1], device=device)
            of_loop[0]["alive"] = alive_at_peak(events())
        for row in of_loop:
            row["mode"] = f"train, outputs {loop}"
            row["outputs"] = loop
        rows += of_loop
    return rows


@contextmanager
def recorded(device: Device) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """A function that returns what a CUDA device's allocator has done since, as ``torch.cuda.memory`` records it; of another
    device nothing."""
    if not isinstance(device, CudaDevice):
        yield list
        return
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=200_000)
    try:
        yield partial(_events_of, device)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _events_of(device: CudaDevice) -> list[dict[str, Any]]:
    snapshot: Any = torch.cuda.memory._snapshot()
    return snapshot["device_traces"][device.device.index]


def alive_at_peak(events: Sequence[Mapping[str, Any]], most: int = 30) -> list[dict[str, Any]]:
    """What was allocated during these events and is alive when most bytes are: by line of the program and size, those that
    take most first; at last all others together."""
    sizes = {}
    for event in events[: _end_of_growth(events)]:
        if event["action"] == "alloc":
            sizes[event["addr"]] = (_line_of(event), event["size"])
        elif event["action"] == "free_requested":
            sizes.pop(event["addr"], None)
    groups = []
    for (line, size), number in Counter(sizes.values()).items():
        groups.append({"line": line, "size": size, "number": number, "total": number * size})
    groups.sort(key=lambda group: -group["total"])
    others = groups[most:]
    if others:
        total = sum(group["total"] for group in others)
        number = sum(group["number"] for group in others)
        groups[most:] = [{"line": "others", "number": number, "total": total}]
    return groups


def _end_of_growth(events: Sequence[Mapping[str, Any]]) -> int:
    """The number of events after which most bytes are alive; of several the last."""
    sizes: dict[int, int] = {}
    alive = 0
    peak = 0
    end = 0
    for number, event in enumerate(events, start=1):
        if event["action"] == "alloc":
            sizes[event["addr"]] = event["size"]
            alive += event["size"]
        elif event["action"] == "free_requested":
            alive -= sizes.pop(event["addr"], 0)
        if alive >= peak:
            peak = alive
            end = number
    return end


def _line_of(event: Mapping[str, Any]) -> str:
    """The innermost line of a model's code; of a backward pass there is none."""
    frames = event.get("frames", ())
    if not frames:
        return "backward pass"
    of_models = [frame for frame in frames if "transformers" in frame["filename"]]
    frame = (of_models or frames)[0]
    return f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}"


def shown(figures: dict[str, Any]) -> list[str]:
    """Peaks by kind; what the simulation lacks with outputs kept and freed; and the largest tensors that are alive then."""
    lines = memory.shown(figures)
    loops = [row for row in figures["rows"] if "outputs" in row and not row["oom"]]
    head = "| outputs | samples | tokens | simulated minus measured | reserved beyond the peak |"
    template = (
        "{outputs} | {num_samples} | {longest_tokens} | "
        "{(simulated_batch_bytes - batch_bytes) / 1e9:+.3f} GB | "
        "{(reserved_bytes - static_bytes - batch_bytes) / 1e9:.3f} GB"
    )
    lines += ["", *table(loops, head, template)]
    for row in loops:
        if row.get("alive"):
            head = f"| alive at the peak, outputs {row['outputs']} | bytes | number | in all |"
            template = "{line} | {size:,} | {number} | {total / 1e9:.3f} GB"
            lines += ["", *table(row["alive"], head, template)]
    return lines
