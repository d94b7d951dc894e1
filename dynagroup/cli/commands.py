"""The functions that run the commands. Names and options of the commands are in the package's ``__init__``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from dynagroup.budget.memory import LENGTHS, WAY_OUT, MemoryBudget, parsed_bytes
from dynagroup.budget.tokens import TokenBudget
from dynagroup.cli.page import Advice, page
from dynagroup.device import CudaDevice
from dynagroup.errors import BudgetError, ConfigError
from dynagroup.files import measure_files, name_of_samples, read_column
from dynagroup.lengths import as_streams, limit_of
from dynagroup.memory import ProfiledMemory, Workload, measure
from dynagroup.memory.phases import Layout
from dynagroup.memory.trace.audio import convolutions, stride_of
from dynagroup.memory.trace.model import as_config, as_random_model
from dynagroup.plan.compare import GROUPING, Comparison, most_units
from dynagroup.plan.compare import compare as compared
from dynagroup.plan.cost import Work, local_device
from dynagroup.plan.plots import new_figure, save_picture
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.shapes import TOKENS, BatchShape, Streams, primary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORTH = 0.95  # a change is proposed if it takes at most this share of today's predicted time


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a command found."""

    figures: Mapping[str, object]  # for JSON
    text: str
    draw: Callable[[], Figure] | None = None  # for --picture
    page: Callable[[], str] | None = None  # as HTML


def run(args: argparse.Namespace) -> None:
    """Runs a command and prints its result."""
    if args.command == "demo":  # prints while it runs
        demo(args)
        return
    result = COMMANDS[args.command](args)
    print(json.dumps(result.figures, indent=1) if args.json else result.text)
    if args.picture and result.draw is not None:
        save_picture(result.draw(), args.picture)
        print(f"picture: {args.picture}", file=sys.stderr if args.json else sys.stdout)
    if args.html and result.page is not None:
        path = Path(args.html)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(result.page(), encoding="utf-8")
        print(f"page: {args.html}", file=sys.stderr if args.json else sys.stdout)


def lengths(args: argparse.Namespace) -> Result:
    """Measures lengths on all cores and writes them to a file."""
    counts = _counts(args, _measured_lengths(args, progress=True))
    text = f"{_counts_text(counts)}\nwritten: {args.output}"
    return Result(figures=counts, text=text)


def _measured_lengths(args: argparse.Namespace, *, progress: bool) -> Streams:
    measured = measure_files(
        args.data,
        _tokenizer(args),
        args.column,
        args.max_length,
        num_proc=args.processes,
        output=args.output,
        kinds=args.kinds,
        sample_by=args.sample_by,
        length_of=_length_of(args),
        progress=progress,
    )
    return as_streams(measured)


def _counts(args: argparse.Namespace, lengths: Streams) -> dict[str, dict[str, int | str]]:
    """Returns, for each stream, what was counted as a sample and as its length, and how much of it."""
    measured = args.length_of
    if args.tokenizer is not None:
        measured = TOKENS
    counts = {}
    for name, values in lengths.items():
        unit = name
        if measured is not None:
            unit = measured if name == TOKENS else f"{name} {measured}"
        counts[name] = {
            "num_samples": len(values),
            "counted": name_of_samples(args.data, args.sample_by),
            "unit": unit,
            "sum": int(values.sum(dtype="int64")),
            "longest": int(values.max()),
        }
    return counts


def _counts_text(counts: Mapping[str, Mapping[str, int | str]]) -> str:
    """Returns one line for each stream."""
    lines = []
    for count in counts.values():
        lines.append(
            f"{count['num_samples']:,} {count['counted']}, {count['sum']:,} {count['unit']} in all, "
            f"the longest {count['longest']:,}"
        )
    return "\n".join(lines)


def _length_of(args: argparse.Namespace) -> Callable[[object], int] | None:
    return None if args.length_of is None else partial(_size, args.length_of)


def _size(unit: str, text: object) -> int:
    if not isinstance(text, str):
        raise ConfigError(
            f"`--length-of` counts the {unit} of texts, but a value is {text!r:.200}; choose a column "
            "of texts with `--column`, or a `--tokenizer` for chats"
        )
    if unit == "words":
        return len(text.split())
    return len(text if unit == "characters" else text.encode())


def _tokenizer(args: argparse.Namespace) -> Any:
    if args.tokenizer is None:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(args.tokenizer)


def lengths_of(args: argparse.Namespace) -> tuple[Streams, list[Any] | None]:
    """Returns the lengths by stream (read from a file, counted from token ids, or measured with a tokenizer), and kinds."""
    streams = _measured_lengths(args, progress=False)
    if len(streams) > 1:  # printed to stderr if stdout must be JSON
        print(
            f"streams: {', '.join(streams)} (their tokens in a batch are added; choose others with --column A[,B])",
            file=sys.stderr if args.json else sys.stdout,
        )
    kinds = None
    if args.kinds is not None:
        kinds = read_column(args.data, args.kinds, "--kinds")
    return streams, kinds


def plan(args: argparse.Namespace) -> Result:
    lengths, kinds = lengths_of(args)
    budget = TokenBudget(
        args.max_tokens, pad_to_multiple_of=args.pad_to_multiple_of, layout=args.layout
    )
    sampler = LengthAwareBatchSampler(
        lengths,
        budget,
        kinds=kinds,
        shuffle=args.shuffle,
        samples_per_update=args.samples_per_update,
        work=_work(args),
        rank=0,
        world_size=args.world_size,
    )
    planned = sampler.plan
    counts = _counts(args, lengths)
    figures = {**planned.statistics, "fingerprint": planned.fingerprint, "counts": counts}
    text = f"{planned.report()}\n{_footer(args, counts)}"
    return Result(figures=figures, text=text, draw=planned.plot)


def compare(args: argparse.Namespace) -> Result:
    lengths, kinds = lengths_of(args)
    comparison = _comparison(args, lengths, kinds)
    counts = _counts(args, lengths)
    figures = {**comparison.figures(), "counts": counts}
    text = f"{comparison.report()}\n{_footer(args, counts)}"
    return Result(figures=figures, text=text, draw=comparison.plot)


def _work(args: argparse.Namespace) -> Work:
    """Returns the predicted time of the given or an unknown model on the given or this machine's device."""
    device = args.device or local_device()
    model = vars(args).get("model")
    if model is None:
        return Work.of_known(None, device=device)
    return Work.of(as_config(model), device=device)


def _footer(args: argparse.Namespace, counts: Mapping[str, Mapping[str, int | str]]) -> str:
    """Returns what was counted, and for which device time is predicted."""
    note = ""
    if args.length_of is not None:
        note = "; above, each of them counts as a token"
    return f"{_counts_text(counts)}{note}\n{_device_line(args)}"


def _device_line(args: argparse.Namespace) -> str:
    if args.device:
        return f"time is predicted for {args.device}"
    return f"time is predicted for {local_device()}, this machine; for another: --device cuda or --device cpu"


def _comparison(
    args: argparse.Namespace,
    lengths: Streams,
    kinds: list[Any] | None,
    most_tokens: int | None = None,
) -> Comparison:
    """Compares ways under the given budget or today's largest batch, and under at most ``most_tokens``."""
    max_tokens = args.max_tokens
    if max_tokens is None:
        max_tokens = args.batch_size * most_units(lengths)
    if most_tokens is not None:
        max_tokens = min(max_tokens, most_tokens)
    budget = TokenBudget(max_tokens, layout=args.layout, pad_to_multiple_of=args.pad_to_multiple_of)
    return compared(
        lengths,
        args.batch_size,
        budget=budget,
        work=_work(args),
        kinds=kinds,
        world_size=args.world_size,
        accumulation=args.accumulation,
    )


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What the memory of a device allows.

    Args:
        text: whether today's batch fits if all samples are the longest, and how many would.
        num_fit: samples of the longest lengths that fit in one batch; None: memory is not known.
        safe_tokens: a token budget with which all batches fit; None: memory is not known, or not one sample fits.
        budget: predicts the memory of padded batches; None: memory is not known, or not even the weights fit.
    """

    text: str
    num_fit: int | None = None
    safe_tokens: int | None = None
    budget: MemoryBudget | None = None


def doctor(args: argparse.Namespace) -> Result:
    """Reports padding, waiting ranks, memory, the predicted time of each way to form batches, and what to change."""
    lengths, kinds = lengths_of(args)
    memory = _memory(args, lengths)
    comparison = _comparison(args, lengths, kinds, memory.safe_tokens)
    today, grouped = comparison.ways[:2]
    ranks = "one rank, so no rank waits"
    if comparison.world_size > 1:
        ranks = f"{comparison.world_size} ranks wait {today.waiting:.0%} of their time for the slowest of a step"
    if memory.num_fit == 0:
        advice = Advice(text=_samples_that_fit(args, lengths, memory.budget))
    else:
        advice = _advice(comparison, memory)
    findings = {
        "change": advice.text,
        "waste": f"{today.padding:.0%} of the tokens of {today.name} batches are padding "
        f"(group_by_length: {grouped.padding:.0%})",
        "ranks": ranks,
        "memory": memory.text or _largest_batch(comparison),
    }
    lines = [f"{name:6}  {text}" for name, text in findings.items()]
    counts = _counts(args, lengths)
    text = "\n".join([*lines, "", comparison.report(), _footer(args, counts)])
    figures = {"findings": findings, **comparison.figures(), "counts": counts}
    sentences = [*_counts_text(counts).splitlines(), *list(findings.values())[1:]]
    as_page = partial(
        page,
        comparison,
        advice,
        data=" ".join(args.data),
        findings=sentences,
        device=_device_line(args),
    )
    return Result(figures=figures, text=text, draw=comparison.plot, page=as_page)


def _advice(comparison: Comparison, memory: Memory) -> Advice:
    """Returns what to change: the fastest way that keeps the quality of training, as code."""
    today, _, exact, stratified = comparison.ways[:4]
    limit = WORTH * today.plan.predicted_time
    fastest = min(exact.plan.predicted_time, stratified.plan.predicted_time)
    fits_today = memory.safe_tokens is None or memory.safe_tokens >= today.largest_batch
    if fastest > limit and fits_today:
        return Advice(text="nothing: other batches of the same updates would save little time here")
    budget = _code_of(comparison.budget)
    updates = f"samples_per_update={comparison.samples_per_update}"
    trainer = budget
    way = exact
    if stratified.plan.predicted_time <= WORTH * exact.plan.predicted_time:
        updates = f"{updates}, grouping={GROUPING}"
        trainer = f"DynagroupConfig(budget={budget}, grouping={GROUPING})"
        way = stratified
    arguments = f"dataset, lengths, {budget}, {updates}"
    text = f"PlannedDataLoader({arguments}); with the Trainer: dynagroup={trainer}"
    loader = f"PlannedDataLoader({arguments}, collate_fn=collate)"
    return Advice(text=text, way=way, loader=loader, trainer=trainer)


def _code_of(budget: Any) -> str:
    """Returns a TokenBudget as code."""
    options = ""
    if budget.pad_to_multiple_of > 1:
        options = f", pad_to_multiple_of={budget.pad_to_multiple_of}"
    if budget.layout == "packed":
        options += ', layout="packed"'
    return f"TokenBudget({budget.max_tokens}{options})"


def _memory(args: argparse.Namespace, lengths: Streams) -> Memory:
    if args.gpu_memory is None:
        return Memory(text="")
    if args.model is None:
        raise ConfigError("`--gpu-memory` needs `--model`, whose memory is predicted; give both")
    longest = {name: max(int(values.max()), 1) for name, values in lengths.items()}
    what = " and ".join(f"{units:,} {name}" for name, units in longest.items())
    try:
        budget = _budget(args, "padded")
    except BudgetError as error:  # not even the weights fit
        return Memory(text=str(error), num_fit=0)
    num_fit = int(budget.most_samples(longest)[0])
    if num_fit == 0:
        text = f"no sample of {what} fits {args.gpu_memory} ({budget.model})"
        return Memory(text=text, num_fit=0, budget=budget)
    ours = budget
    if args.layout == "packed":
        ours = _budget(args, "packed")
    safe_tokens = ours.max_tokens(max(longest.values()))
    verdict = f"do not fit {args.gpu_memory}: {num_fit} do"
    if num_fit >= args.batch_size:
        verdict = f"fit {args.gpu_memory}; up to {num_fit:,} would"
    text = (
        f"{args.batch_size} samples of {what} {verdict} ({budget.model}); "
        f"a budget that is safe: {safe_tokens:,} tokens"
    )
    return Memory(text=text, num_fit=num_fit, safe_tokens=safe_tokens, budget=budget)


def _samples_that_fit(
    args: argparse.Namespace, lengths: Streams, budget: MemoryBudget | None
) -> str:
    """Returns how many samples fit although the longest do not, and what makes more of them fit."""
    share = "none"
    if budget is not None:
        longest = {name: np.maximum(values, 1) for name, values in lengths.items()}
        fits = budget.fits(BatchShape.of(1, longest))
        tokens = lengths[primary(lengths)][fits].max(initial=0)
        share = f"{fits.mean():.1%}, up to {tokens:,} {primary(lengths)}"
    return (
        f"nothing: not one of the longest samples fits {args.gpu_memory}. Samples that fit alone: {share}. Try --dtype "
        "bfloat16, --gradient-checkpointing or --lora, or cut the samples: --max-length"
    )


def _largest_batch(comparison: Comparison) -> str:
    today = comparison.ways[0]
    padded = sorted(today.plan.padded)
    typical = int(padded[len(padded) // 2]) if padded else 0
    share = typical / max(today.largest_batch, 1)
    return (
        f"the largest batch has {today.largest_batch:,} tokens, a typical one {typical:,} ({share:.0%} of it); "
        "give --model and --gpu-memory to see whether it fits"
    )


USUAL = {
    "mode": "train",
    "pad_to_multiple_of": 1,
    "layout": "padded",
    "dtype": None,
    "autocast": None,
    "attention": None,
    "gradient_checkpointing": False,
    "lora": False,
}


def _workload(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings of the workload that are not defaults, as arguments of ``MemoryBudget.from_model``."""
    settings = vars(args)
    workload: dict[str, Any] = {}
    for name, usual in USUAL.items():
        if settings[name] != usual:
            workload[name] = settings[name]
    if args.mode == "generate":
        workload["max_new_tokens"] = args.max_new_tokens
    if args.fsdp:
        workload["sharding"] = "fsdp"
        workload["num_ranks"] = args.fsdp
    return workload


def _budget(args: argparse.Namespace, layout: Layout) -> MemoryBudget:
    """Returns the budget of the model and memory that the arguments name."""
    workload = {**_workload(args), "layout": layout}
    return MemoryBudget.from_model(args.model, args.gpu_memory, **workload)


def fit(args: argparse.Namespace) -> Result:
    """Reports which batches fit, from a trace of the model or from measurements."""
    framework = args.framework
    if framework is not None:  # it packs samples, so attention must keep them apart
        args.layout = "packed"
        args.attention = args.attention or "flash"
    if args.measure:
        budget, code = _measured(args)
    else:
        budget = _budget(args, args.layout)
        arguments = [repr(args.model), repr(args.gpu_memory)]
        arguments += [f"{name}={value!r}" for name, value in _workload(args).items()]
        code = f"MemoryBudget.from_model({', '.join(arguments)})"
    figures = budget.figures()
    figures["code"] = code
    lines = [str(budget), code]
    if framework is not None:
        setting = setting_for(args, figures["max_tokens"], figures["longest"][-1])
        figures["setting"] = setting
        lines.append(setting)
    return Result(
        figures=figures, text="\n".join(lines), draw=lambda: _curve(figures, budget.about)
    )


# Settings that limit the tokens of a packed micro-batch, for training or forward passes (log-probabilities), in 2026 (TRL 1.16).
# T: most tokens of a micro-batch; L: longest sample; N: samples of L tokens in T tokens, for frameworks that count samples.
SETTINGS = {
    "verl": {
        "train": "actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.use_dynamic_bsz=True "
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu={T}",
        "forward": "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True "
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu={T} "
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True "
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu={T}",
    },
    "trl": {
        "train": "SFTConfig(packing=True, max_length={L}, per_device_train_batch_size={N})",
    },
    "llamafactory": {
        "train": "flash_attn=fa2 neat_packing=true cutoff_len={L} per_device_train_batch_size={N}",
    },
    "nemo": {
        "train": "policy.sequence_packing.enabled=true policy.sequence_packing.train_mb_tokens={T}",
        "forward": "policy.sequence_packing.enabled=true policy.sequence_packing.logprob_mb_tokens={T}",
    },
    "megatron": {
        "train": "--micro-batch-size 1 --sequence-packing-scheduler dp_balanced --max-seqlen-per-dp-cp-rank {T}",
    },
}


def setting_for(args: argparse.Namespace, max_tokens: int, num_positions: int) -> str:
    """Returns the framework's setting that limits packed batches to ``max_tokens``."""
    settings = SETTINGS[args.framework]
    if args.mode not in settings:
        modes = " or ".join(settings)
        raise ConfigError(
            f"`--for {args.framework}` needs `--mode {modes}`, but `--mode` is {args.mode}"
        )
    longest = limit_of(args.max_length) or min(max_tokens, num_positions)
    if longest <= 0:
        raise BudgetError(
            f"not even one token fits, but a packed batch may have only {max_tokens:,} tokens; {WAY_OUT}"
        )
    if longest > max_tokens:
        raise BudgetError(
            f"`--max-length` is {longest}, but a packed batch may have only {max_tokens:,} tokens; {WAY_OUT}"
        )
    return settings[args.mode].format(T=max_tokens, L=longest, N=max_tokens // longest)


def _curve(figures: Mapping[str, Any], about: str) -> Figure:
    figure = new_figure(6, 4)
    axes = figure.subplots()
    axes.loglog(figures["longest"], figures["samples"], marker="o", nonpositive="mask")
    axes.set(xlabel="tokens of the longest sample", ylabel="samples that fit")
    lines = []
    for part in about.split("\n"):
        lines += wrap(part, 80)
    axes.set_title("\n".join(lines), fontsize=9)
    distinct = [samples for samples in dict.fromkeys(figures["samples"]) if samples]
    for axis, marks in ((axes.xaxis, figures["longest"]), (axes.yaxis, distinct)):
        axis.set_ticks(marks, [f"{mark:,}" for mark in marks])
        axis.set_ticks([], minor=True)
    return figure


def _measured(args: argparse.Namespace) -> tuple[MemoryBudget, str]:
    device = CudaDevice()  # raises for wrong values before a model is built
    limit = parsed_bytes(args.gpu_memory)
    config = as_config(args.model)
    if args.lora or args.fsdp:
        raise ConfigError(
            "`--measure` runs the whole model on one device; leave out `--lora` and `--fsdp`"
        )
    workload = Workload.from_model(
        config,
        args.mode,
        dtype=args.dtype,
        autocast=args.autocast,
        attention=args.attention,
        gradient_checkpointing=args.gradient_checkpointing,
        layout=args.layout,
        max_new_tokens=args.max_new_tokens if args.mode == "generate" else None,
    )
    num_positions = getattr(config, "max_position_embeddings", None) or LENGTHS[-1]
    stride = stride_of(convolutions(config))
    shapes = []
    for length in LENGTHS:
        if length <= num_positions:
            shapes += [(2, length * stride), (8, length * stride)]
    model = as_random_model(config, workload, device.device)
    profile = ProfiledMemory.fit(measure(model, workload, shapes))
    budget = MemoryBudget.from_bytes(limit, model=profile)
    code = f"MemoryBudget.from_bytes({limit}, model=ProfiledMemory.fit(rows))"
    return budget, code


def check(args: argparse.Namespace) -> Result:
    from dynagroup.integrations.check import check_model

    answers = check_model(args.model)
    lines = [f"{name:7}  {text}" for name, text in answers.items()]
    return Result(figures=answers, text="\n".join(lines))


def demo(args: argparse.Namespace) -> None:
    from dynagroup.demo import DemoConfig, run_demo

    config = DemoConfig()
    for name, value in vars(args).items():
        if name in DemoConfig.__slots__ and value is not None:
            config = replace(config, **{name: value})
    run_demo(config)


COMMANDS = {
    "lengths": lengths,
    "plan": plan,
    "compare": compare,
    "doctor": doctor,
    "fit": fit,
    "check": check,
}
