"""The functions that run the commands. Names and options of the commands are in the package's ``__init__``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, TypeAlias

from dynagroup.budget.memory import LENGTHS, WAY_OUT, MemoryBudget, parsed_bytes
from dynagroup.budget.tokens import TokenBudget
from dynagroup.device import CudaDevice
from dynagroup.errors import BudgetError, ConfigError
from dynagroup.files import measure_files, read_column
from dynagroup.lengths import as_streams, limit_of
from dynagroup.memory import ProfiledMemory, Workload, measure
from dynagroup.memory.trace.model import as_config, as_random_model
from dynagroup.plan.compare import MEGA_BATCHES, Comparison, most_units
from dynagroup.plan.compare import compare as compared
from dynagroup.plan.cost import Work
from dynagroup.plan.plots import drawn, new_figure, save_picture
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.shapes import Streams

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORTH = 0.95  # a change is proposed if it takes at most this share of today's predicted time
Found: TypeAlias = "tuple[Mapping[str, Any], object, Callable[[], Figure]]"
"""Results for JSON, text to print, and a function that draws a picture."""


def run(args: argparse.Namespace) -> None:
    """Runs a command and prints its result."""
    if args.command == "demo":  # prints while it runs
        return demo(args)
    known = {"lengths": lengths, "plan": plan, "compare": compare, "doctor": doctor, "check": check}
    figures, text, draw = known.get(args.command, fit)(args)
    print(json.dumps(figures, indent=1) if args.json else text)
    if vars(args).get("picture"):
        save_picture(draw(), args.picture)
        print(f"picture: {args.picture}", file=sys.stderr if args.json else sys.stdout)
    if vars(args).get("html"):
        Path(args.html).write_text(
            page(f"dynagroup {args.command}", str(text), draw()), encoding="utf-8"
        )


STYLE = (
    "body{font:15px sans-serif;margin:2em;max-width:75em}"
    "pre{font-size:13px}svg{max-width:100%;height:auto}"
)


def page(title: str, text: str, figure: Figure) -> str:
    """Returns a static HTML page with a report and a figure as SVG, in one file without scripts."""
    svg = drawn(figure, "svg").decode()
    svg = svg[svg.index("<svg") :]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n<pre>{escape(text)}</pre>\n{svg}</body></html>\n"
    )


def lengths(args: argparse.Namespace) -> Found:
    """Measures lengths on all cores and writes them to a file."""
    found = _lengths(args, num_proc=args.processes, output=args.output).items()
    sums = lambda n: {  # noqa: E731
        "num_samples": len(n),
        "sum": int(n.sum(dtype="int64")),
        "longest": int(n.max()),
    }
    told = {name: sums(lengths) for name, lengths in found}
    line = "{}: {num_samples:,} samples, {sum:,} in all, the longest {longest:,}"
    lines = [line.format(name, **figures) for name, figures in told.items()]
    return told, "\n".join([*lines, f"written: {args.output}"]), lambda: new_figure(1, 1)


def _lengths(args: argparse.Namespace, **how: Any) -> Streams:
    tokenizer = None
    if args.tokenizer is not None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    how["kinds"] = vars(args).get("kinds")
    return as_streams(measure_files(args.data, tokenizer, args.column, args.max_length, **how))


def lengths_of(args: argparse.Namespace) -> tuple[Streams, list[Any] | None]:
    """Returns the lengths by stream (read from a file, counted from token ids, or measured with a tokenizer), and kinds."""
    streams = _lengths(args, num_proc=1, progress=False)
    if len(streams) > 1:  # printed to stderr if stdout must be JSON
        line = f"streams: {', '.join(streams)} (their tokens in a batch are added; choose others with --column A[,B])"
        print(line, file=sys.stderr if args.json else sys.stdout)
    return streams, None if args.kinds is None else read_column(args.data, args.kinds, "--kinds")


def plan(args: argparse.Namespace) -> Found:
    lengths, kinds = lengths_of(args)
    budget = TokenBudget(
        args.max_tokens, pad_to_multiple_of=args.pad_to_multiple_of, layout=args.layout
    )
    options = {
        name: getattr(args, name)
        for name in ("shuffle", "window", "samples_per_update", "world_size")
    }
    found = LengthAwareBatchSampler(
        lengths, budget, kinds=kinds, rank=0, work=Work(is_assumed=True), **options
    ).plan
    figures = {**found.statistics, "fingerprint": found.fingerprint}
    return figures, found.report(), found.plot


def compare(args: argparse.Namespace) -> Found:
    found = _comparison(args)
    return found.figures(), found.report(), found.plot


def _comparison(args: argparse.Namespace) -> Comparison:
    lengths, kinds = lengths_of(args)
    most = args.batch_size * most_units(lengths) if args.max_tokens is None else args.max_tokens
    budget = TokenBudget(most, layout=args.layout, pad_to_multiple_of=args.pad_to_multiple_of)
    work = None if args.model is None else Work.of(as_config(args.model))
    options = {"world_size": args.world_size, "accumulation": args.accumulation}
    return compared(lengths, args.batch_size, budget=budget, work=work, kinds=kinds, **options)


def doctor(args: argparse.Namespace) -> Found:
    """Reports padding, waiting ranks, memory, the predicted time of each way to form batches, and what to change."""
    found = _comparison(args)
    memory, safe = _memory(args, found)
    today, grouped = found.ways[:2]
    waits = (
        f"{found.world_size} ranks wait {today.waiting:.0%} of their time for the slowest of a step"
    )
    waste = f"{today.padding:.0%} of the tokens of {today.name} batches are padding (group_by_length: {grouped.padding:.0%})"
    ranks = waits if found.world_size > 1 else "one rank, so no rank waits"
    findings = {
        "change": _change(found, args.layout, safe),
        "waste": waste,
        "ranks": ranks,
        "memory": memory,
    }
    lines = [f"{name:6}  {text}" for name, text in findings.items()]
    text = "\n".join([*lines, "", found.report()])
    return {"findings": findings, **found.figures()}, text, found.plot


def _change(found: Comparison, layout: str, safe: int | None) -> str:
    """Returns what to change: the fastest way that keeps the quality of training, as code."""
    today, _, exact, stratified = found.ways[:4]
    limit = WORTH * today.plan.predicted_time
    saves_time = min(way.plan.predicted_time for way in (exact, stratified)) <= limit
    does_not_fit = safe is not None and safe < today.largest_batch
    if not saves_time and not does_not_fit:
        return "nothing: other batches of the same updates would save little time here"
    most = getattr(found.budget, "max_tokens", today.largest_batch)
    most = most if safe is None else min(most, max(safe, 1))
    packed = ', layout="packed"' if layout == "packed" else ""
    budget = f"TokenBudget({most}{packed})"
    loader = f"PlannedDataLoader(dataset, lengths, {budget}"
    updates = f"samples_per_update={found.samples_per_update}"
    if stratified.plan.predicted_time > WORTH * exact.plan.predicted_time:
        return f"{loader}, {updates}); with the Trainer: dynagroup={budget}"
    grouping = f"grouping={MEGA_BATCHES}"
    config = f"DynagroupConfig(budget={budget}, {grouping})"
    return f"{loader}, {updates}, {grouping}); with the Trainer: dynagroup={config}"


def _memory(args: argparse.Namespace, found: Comparison) -> tuple[str, int | None]:
    """Returns a text that says whether today's batch fits the device if all samples are the longest, and how many would
    fit; and a token budget that is safe for all lengths (None: memory is not known)."""
    if args.gpu_memory is None:
        today = found.ways[0]
        middle = int([*sorted(today.plan.padded), 0][len(today.plan.padded) // 2])
        share = f"{middle / max(today.largest_batch, 1):.0%} of it"
        told = f"the largest batch has {today.largest_batch:,} tokens, a typical one {middle:,} ({share})"
        return f"{told}; give --model and --gpu-memory to see whether it fits", None
    if args.model is None:
        raise ConfigError("`--gpu-memory` needs `--model`, whose memory is predicted; give both")
    longest = {name: max(int(values.max()), 1) for name, values in found.lengths.items()}
    budget = MemoryBudget.from_model(
        args.model, args.gpu_memory, **{**_workload(args), "layout": "padded"}
    )
    ours = (
        MemoryBudget.from_model(args.model, args.gpu_memory, **_workload(args))
        if args.layout == "packed"
        else budget
    )
    most, safe = int(budget.most_samples(longest)[0]), ours.max_tokens(max(longest.values()))
    what = " and ".join(f"{units:,} {name}" for name, units in longest.items())
    fits, end = (
        ("fit", f"; up to {most:,} would")
        if most >= found.batch_size
        else ("do not fit", f": {most} do")
    )
    answer = f"{found.batch_size} samples of {what} {fits} {args.gpu_memory}{end} ({budget.model})"
    return f"{answer}; a budget that is safe: {safe:,} tokens", safe


def _workload(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings of the workload that are not defaults, as arguments of ``MemoryBudget.from_model``."""
    usual = {"mode": "train", "headroom": 0.9, "pad_to_multiple_of": 1, "layout": "padded"}
    names = (*usual, "dtype", "autocast", "attention", "gradient_checkpointing", "lora")
    told = {
        name: value
        for name in names
        if (value := vars(args).get(name)) and value != usual.get(name)
    }
    told |= {"max_new_tokens": args.max_new_tokens} if told.get("mode") == "generate" else {}
    return told | ({"sharding": "fsdp", "num_ranks": args.fsdp} if vars(args).get("fsdp") else {})


def fit(args: argparse.Namespace) -> Found:
    """Reports which batches fit, from a trace of the model or from measurements."""
    if (
        vars(args)["for"] is not None
    ):  # these frameworks pack samples, so attention must keep them apart
        args.layout, args.attention = "packed", args.attention or "flash"
    if vars(args).get("measure"):
        budget, code = _measured(args)
    else:
        how = _workload(args)
        budget = MemoryBudget.from_model(args.model, args.gpu_memory, **how)
        told = "".join(f", {name}={value!r}" for name, value in how.items())
        code = f"MemoryBudget.from_model({args.model!r}, {args.gpu_memory!r}{told})"
    found = budget.figures()
    setting = (
        None
        if vars(args)["for"] is None
        else setting_for(args, found["max_tokens"], found["longest"][-1])
    )
    told = {"code": code, **({"setting": setting} if setting else {})}
    return (
        {**found, **told},
        "\n".join([str(budget), *told.values()]),
        lambda: _curve(found, budget),
    )


# Settings that limit the tokens of a packed micro-batch, for training or forward passes (log-probabilities), in 2026 (TRL 1.16).
# T: most tokens of a micro-batch; L: longest sample; N: samples of L tokens in T tokens, for frameworks that count samples.
SETTINGS = {
    (
        "verl",
        "train",
    ): "actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.use_dynamic_bsz=True "
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu={T}",
    ("verl", "forward"): "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True "
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu={T} actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True "
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu={T}",
    ("trl", "train"): "SFTConfig(packing=True, max_length={L}, per_device_train_batch_size={N})",
    (
        "llamafactory",
        "train",
    ): "flash_attn=fa2 neat_packing=true cutoff_len={L} per_device_train_batch_size={N}",
    (
        "nemo",
        "train",
    ): "policy.sequence_packing.enabled=true policy.sequence_packing.train_mb_tokens={T}",
    (
        "nemo",
        "forward",
    ): "policy.sequence_packing.enabled=true policy.sequence_packing.logprob_mb_tokens={T}",
    (
        "megatron",
        "train",
    ): "--micro-batch-size 1 --sequence-packing-scheduler dp_balanced --max-seqlen-per-dp-cp-rank {T}",
}


def setting_for(args: argparse.Namespace, most: int, positions: int) -> str:
    """Returns the framework's setting that limits packed batches to ``most`` tokens."""
    framework = vars(args)["for"]
    if (framework, args.mode) not in SETTINGS:
        modes = " or ".join(mode for name, mode in SETTINGS if name == framework)
        raise ConfigError(
            f"`--for {framework}` needs `--mode {modes}`, but `--mode` is {args.mode}"
        )
    longest = limit_of(args.max_length) or min(most, positions)
    if not 0 < longest <= most:
        told = f"`--max-length` is {longest}" if longest else "not even one token fits"
        raise BudgetError(f"{told}, but a packed batch may have only {most:,} tokens; {WAY_OUT}")
    return SETTINGS[framework, args.mode].format(T=most, L=longest, N=most // longest)


def _curve(found: Mapping[str, Any], budget: MemoryBudget) -> Figure:
    figure = new_figure(6, 4)
    axes = figure.subplots()
    axes.loglog(found["longest"], found["samples"], marker="o", nonpositive="mask")
    axes.set(xlabel="tokens of the longest sample", ylabel="samples that fit")
    axes.set_title(
        "\n".join(line for part in budget.about.split("\n") for line in wrap(part, 80)), fontsize=9
    )
    few = [samples for samples in dict.fromkeys(found["samples"]) if samples]
    for axis, marks in ((axes.xaxis, found["longest"]), (axes.yaxis, few)):
        axis.set_ticks(marks, [f"{mark:,}" for mark in marks])
        axis.set_ticks([], minor=True)
    return figure


def _measured(args: argparse.Namespace) -> tuple[MemoryBudget, str]:
    device, limit = (
        CudaDevice(),
        parsed_bytes(args.gpu_memory),
    )  # raises for wrong values before a model is built
    config, about_plans = as_config(args.model), ("mode", "headroom", "pad_to_multiple_of")
    how = {name: value for name, value in _workload(args).items() if name not in about_plans}
    workload = Workload.from_model(config, args.mode, **how)
    most = getattr(config, "max_position_embeddings", None) or LENGTHS[-1]
    shapes = [(count, length) for length in LENGTHS if length <= most for count in (2, 8)]
    profile = ProfiledMemory.fit(
        measure(as_random_model(config, workload, device.device), workload, shapes)
    )
    code = f"MemoryBudget.from_bytes({limit}, model=ProfiledMemory.fit(rows), headroom={args.headroom})"
    return MemoryBudget.from_bytes(limit, model=profile, headroom=args.headroom), code


def check(args: argparse.Namespace) -> Found:
    from dynagroup.integrations.check import check_model

    found = check_model(args.model)
    return (
        found,
        "\n".join(f"{name:7}  {text}" for name, text in found.items()),
        lambda: new_figure(1, 1),
    )


def demo(args: argparse.Namespace) -> None:
    from dynagroup.demo import DemoConfig, run_demo

    run_demo(
        DemoConfig(**{k: v for k, v in vars(args).items() if k != "command" and v is not None})
    )
