"""The figures of README and docs, written into the pages from ``benchmarks/results``: ``python scripts/doc_tables.py``.

A page says ``<!-- figures: NAME -->`` and ``<!-- end -->``; what stands between them is the table or sentence of that name below.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, Spread, body, line, rows_of, table

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"<!-- figures: (\w+) -->.*?<!-- end -->", re.S)
MARKED = ("docs/benchmarks.md", "docs/alignment.md", "docs/planning.md")
DOCTOR = (
    "doctor benchmarks/lengths/azure_llm_conv_2023.npz --column tokens --max-length 4k --batch-size 8 --world-size 4"
)
Table = list[str]


def read(name: str) -> dict[str, Any]:
    """A file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def figures(name: str) -> dict[str, Any]:
    return read(name)["figures"]


# Planning


PADDING = {
    "fixed 16, shuffled": "fixed_16_shuffled", "HF `group_by_length`": "hf_group_by_length_16",
    "sorted": "dynagroup_whole_set", "`window` of 50 batches": "dynagroup_window_50_batches",
    "`shuffle=True`": "dynagroup_shuffle", "`samples_per_update=256`": "dynagroup_update_of_256",
}  # fmt: skip
IN_README = ("gsm8k", "azure_llm_conv_2023", "t0_mix_50k", "mooncake_conv", "python_files")


def padding_rows() -> Table:
    """README: a data set a row, padding and steps of five methods."""
    heads = ("fixed 16, shuffled", "HF `group_by_length`", "`samples_per_update=256`", "`shuffle=True`", "sorted")
    found, ways = figures("plan_padding"), [PADDING[head] for head in heads]
    rows = [
        {"key": name, "cv": found[name]["cv"], **{way: (1 - found[name][way][0], found[name][way][1]) for way in ways}}
        for name in IN_README
    ]
    return body(rows, ["{key} (CV {cv:.2f})", *(f"{{{way}[0]:.1%}}, {{{way}[1]:,}}" for way in ways)])


def efficiency() -> Table:
    columns = {head: f"{{{way}[0]:.3f}}, {{{way}[1]:,}}" for head, way in PADDING.items()}
    rows = sorted(rows_of(figures("plan_padding")), key=lambda row: row["key"])
    return table(rows, {"lengths": "{key}", "CV": "{cv:.2f}", **columns})


def streams_rows() -> Table:
    cell = "{WAY[by_first_stream][padding]:.0%} -> {WAY[by_both][padding]:.0%}, {WAY[share_of_time]:.2f}"
    cells = [cell.replace("WAY", way) for way in ("updates of 256", "windows of 4,096", "sorted whole")]
    return body(rows_of(figures("streams")["pairs"]), ["{key} ({what})", *cells])


def packing_rows(dataset: str) -> Table:
    """A way of packing a row; its time is relative to the first row's."""
    rows = rows_of(figures("pack")["files"][dataset]["methods"])
    for row in rows:
        row |= {"same": "yes" if row["same_updates"] else "no", "time": row["critical_path"] / rows[0]["critical_path"]}
    cells = ("{steps:,}", "{fill:.1%}", "{row_imbalance:.2f}", "{samples_cut:,}", "{samples_dropped:,}", "{same}")
    return body(rows, ["{key}", *cells, "{time:.2f}"])


def planning_speed() -> Table:
    named = {
        "token_budget_1m": "1,000,000 lengths, `TokenBudget`",
        "token_budget_1m_shuffled": "the same, `shuffle=True`",
        "token_budget_10m": "10,000,000 lengths",
        "memory_budget_1m_pretrained": "1,000,000 lengths, `MemoryBudget` with the pretrained regressor",
        "two_padded_streams_1m": "1,000,000 samples with two padded streams, sorted by both",
        "first_batch_of_10m_window_4096": "first batch of 10,000,000, `window=4096`",
    }
    rows = [{"key": name, **figures("plan_speed")[key]} for key, name in named.items()]
    return table(rows, {"": "{key}", "CPU time": "{median_s:.3g} s ({min_s:.3g} to {max_s:.3g})"})


PLANNING_RIVAL = (
    "dynabatch 0.2.23 needs {batch_size_8[dynabatch][median_s]:.3g} s for {samples:,} lengths at batch size 8 and "
    "{batch_size_32[dynabatch][median_s]:.3g} s at 32 (one run each); with `MemoryBudget` the same plans take "
    "{batch_size_8[memory_budget][median_s]:.3g} s and {batch_size_32[memory_budget][median_s]:.3g} s: "
    "{batch_size_8[times_faster_memory_budget]:.0f} and {batch_size_32[times_faster_memory_budget]:.0f} times less; "
    "with `TokenBudget` {batch_size_8[times_faster_token_budget]:,.0f} and "
    "{batch_size_32[times_faster_token_budget]:,.0f} times less."
)


def growth() -> Table:
    rows = rows_of(figures("growth"))
    for row in rows:
        row |= {"first": _short(row["costs"][0]), "last": _short(row["costs"][-1]), "largest": row["sizes"][-1]}
    over = {"over": "{sizes[0]:,} to {largest:,} {over}", "from, to": "{first} to {last} {unit}"}
    return table(rows, {"": "{key}", **over, "exponent": "{exponent:.2f}"})


def _short(value: float) -> str:
    """A number of about three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def cut() -> Table:
    """A data set and number of ranks a row: predicted cost over the cut into fewest batches, and shares of real tokens."""
    found = figures("cut")
    sizes = list(dict.fromkeys(name.split("/")[1] for name in found))
    files = (
        *("azure_llm_conv_2023", "python_files", "mooncake_conv", "synth_sharegpt4o", "synth_ultrachat"),
        *("t0_mix_50k", "gsm8k"),
    )
    rows = []
    for ranks, name in [(ranks, name) for ranks in ("1", "8") for name in files]:
        row: dict[str, Any] = {"key": name, "ranks": ranks}
        for size in sizes:
            one = found[f"{name}/{size}/{ranks}"]
            row |= {f"of {size}": one, f"cost {size}": one["now"]["cost"] / one["before"]["cost"]}
        rows.append(row)
    cell = "**{cost SIZE:.2f}** ({of SIZE[before][real_share]:.2f} → {of SIZE[now][real_share]:.2f})"
    heads = [f"updates of {sizes[0]}", *sizes[1:]]
    cells = {head: cell.replace("SIZE", size) for head, size in zip(heads, sizes, strict=True)}
    return table(rows, {"lengths": "{key}", "ranks": "{ranks}", **cells})


def shards() -> Table:
    found = figures("shards")
    names = [key.removesuffix("/packed") for key in found if key.endswith("/packed")]
    rows = [{"key": name, "packed": found[f"{name}/packed"], "padded": found[f"{name}/padded"]} for name in names]
    path = "{WAY[critical_path]:.2f} ({WAY[over_bound]:.3f}, {WAY[rival_over_bound]:.3f})"
    count = "{WAY[micro_batches]:.0f}, {WAY[rival_micro_batches]:.0f}"
    cells = [template.replace("WAY", layout) for layout in ("packed", "padded") for template in (path, count)]
    head = line("lengths", *("packed", "micro-batches", "padded", "micro-batches"))
    return [head, "|" + "---|" * 5, *body(rows, ["{key}", *cells])]


# Loading


def loader_speed() -> Table:
    found = figures("loader_speed")
    peers = {"plain": "plain, 16 a batch", "odb": "online-dynamic-batching, window 256"}
    rows = [
        {"key": name, "speeds": ", ".join(f"{v:,}" for v in one["samples_per_cpu_s"]), "real_share": one["real_share"]}
        | {short: found[f"{name} / {peer}"] for short, peer in peers.items() if f"{name} / {peer}" in found}
        for name, one in found.items()
        if " / " not in name
    ]
    columns = {
        "loader": "{key}", "samples a CPU second, each turn": "{speeds}", "real / padded tokens": "{real_share:.3f}",
        "against plain": "{plain:.1fx}", "against online-dynamic-batching": "{odb:.1fx}",
    }  # fmt: skip
    return table(rows, columns)


def loader_overhead() -> str:
    found = {name: Spread(one) for name, one in figures("loader_overhead").items()}
    step, window = found["microseconds_a_step"], found["milliseconds_to_cut_1024"]["median"]
    return f"{step:.0f} microseconds a step on one rank; cutting a window of 1,024: {window:.2f} ms"


def loader_fill() -> Table:
    ways = {"dynagroup, window 256": "dynagroup 256", "online-dynamic-batching, window 256": "online-dynamic-batching 256",
            "dynagroup, window 1,024": "dynagroup 1024"}  # fmt: skip
    cells = {head: f"{{{way}[real_share]:.3f}}, {{{way}[steps]}} steps" for head, way in ways.items()}
    return table(rows_of(figures("loader_fill")), {"lengths": "{key}", **cells})


ALIGNED = {
    "this protocol": "{above_all_batches_over_ranks:.1%}",
    "fixed shards": "{above_with_fixed_shards:.1%}",
    "idle before splitting": "{idle_share_before_splitting:.1%}",
    "exchanges": "{exchanges}",
    "bytes a rank a step": "{bytes_a_rank_a_step:.0f}",
}


def ranks() -> Table:
    """A simulation a row: the largest of every file, all of the one with most."""
    rows = [
        {"key": name, **run}
        for name, runs in sorted(figures("loader_ranks")["windows"].items())
        for run in (runs if len(runs) > 3 else runs[-1:])
    ]
    return table(rows, {"lengths": "{key}", "ranks": "{ranks:,}", "samples a rank": "{samples_a_rank:,}", **ALIGNED})


def protocol() -> Table:
    """A number of ranks a row, at 16,000 samples a rank of CV 1.0."""
    runs = figures("loader_ranks")["windows"]["synth_sharegpt4o"]
    columns = {
        "ranks": "{ranks:,}", "this protocol": ALIGNED["this protocol"],
        "fixed shards, aligned at the end": ALIGNED["fixed shards"],
        "every window aligned": "{above_with_alignment_of_every_window:.1%}",
        "exchanges an epoch": "{exchanges}", "bytes a rank a step": ALIGNED["bytes a rank a step"],
    }  # fmt: skip
    return table([run for run in runs if run["samples_a_rank"] == 16_000 and run["ranks"] > 1], columns)


BALANCE = (
    "the dearest rank of a step takes {windows[row_imbalance]:.1%} more predicted time than the mean rank in the first "
    "epoch ({windows[if_ranks_shuffled_apart]:.0%} if each rank shuffled by itself), {learned lengths[row_imbalance]:.1%} "
    "once lengths are learned"
)


# Training


def demo() -> Table:
    columns = {
        "": "{key}", "samples/s": "{samples_per_s:.0f}", "real tokens/s": "{real_tokens_per_s:,.0f}",
        "padding": "{padding:.1%}", "largest batch": "{largest_batch_tokens:,}", "steps": "{steps}",
        "updates": "{updates}", "CPU s": "{seconds:.0f}", "held-out loss": "{held_out_loss:.4f}",
    }  # fmt: skip
    return table(rows_of(read("demo_cpu")["runs"]), columns)


def demo_speed() -> str:
    """How much faster, with its spread."""
    found = read("demo_cpu")
    low, high = found["speedup_quartiles"]
    return f"{found['speedup']:.2f}x samples/s in the median update (middle half: {low:.2f}x to {high:.2f}x)"


def rivals() -> Table:
    """Samples a second only where every method had the same ones."""
    rows = []
    for case, found in figures("train_rivals").items():
        fixed = found["methods"]["fixed"]
        base = fixed["samples_per_s"]["median"]
        for row in rows_of(found["methods"]):
            speed, own = row.pop("samples_per_s"), row["same_updates"]
            row |= {"case": case, "tokens": row["real_tokens_per_s"] / fixed["real_tokens_per_s"], "same": "no"}
            if own:
                over = {"median": speed["median"] / base, "quartiles": [q / base for q in speed["quartiles"]]}
                row |= {"speed": over, "same": "yes", "loss": row["held_out_loss"]}
            rows.append(row)
    columns = {
        "lengths": "{case}", "method": "{key}", "real tokens/s over fixed": "{tokens:.2f}x",
        "samples/s over fixed (quartiles)": "{speed:.2fx}", "padding": "{padding:.1%}",
        "batches an update": "{batches_per_update:.1f}", "held-out loss": "{loss:.4f}", "same updates": "{same}",
    }  # fmt: skip
    return table(rows, columns)


def rivals_best() -> str:
    """Where ours is fastest among those that keep the updates, and where not."""
    said = []
    for case, found in figures("train_rivals").items():
        same = {name: one["samples_per_s"]["median"] for name, one in found["methods"].items() if one["same_updates"]}
        best = max((name for name in same if not name.startswith("dynagroup")), key=same.__getitem__)
        said.append(f"{case}: {same['dynagroup'] / same[best]:.2f} times the best of them ({best})")
    return "; ".join(said)


def ranks_training() -> Table:
    named = {"fixed batches": "fixed", "`samples_per_update=128`": "update", "free-running": "free"}
    rows = []
    for name, key in named.items():
        found = figures("loader_train")[key]
        speeds, over = ", ".join(f"{value:.0f}" for value in sorted(found["samples_per_s"])), found["speed_over_fixed"]
        rows.append({**found, "key": name, "speeds": speeds, "low": min(over), "high": max(over)})
    columns = {
        "": "{key}", "samples/s": "{speeds}", "against fixed": "{low:.2f}x to {high:.2f}x",
        "held-out loss": "{held_out_loss:.3f}", "updates": "{updates}", "steps": "{steps}",
    }  # fmt: skip
    return table(rows, columns)


def trainer() -> Table:
    named = {
        "plain_over_plain": "a plain Trainer over another (control)",
        "equal_batches": "dynagroup over plain, equal batches",
        "tiny_equal_batches": "the same with a model of one layer of 8, where the adapter is not lost in noise",
        "texts": "dynagroup over plain, lengths like texts (lognormal, 8 to 128 tokens)",
    }
    rows = [{"key": name, **figures("trainer")[key]} for key, name in named.items()]
    columns = {
        "": "{key}", "median ratio (quartiles)": "{ratio:.3f}",
        "95 % interval of the median": "{sure[0]:.3f} to {sure[1]:.3f}", "difference an update": "{ms[median]:.1f} ms",
    }  # fmt: skip
    return table([{**row, "sure": row["ratio"]["median_95"], "ms": row["difference_ms"]} for row in rows], columns)


def quality() -> Table:
    found = figures("quality")
    losses = zip(found["held_out_loss"]["fixed"], found["held_out_loss"]["free"], strict=True)
    rows = [{"key": seed, "fixed": fixed, "free": free} for seed, (fixed, free) in enumerate(losses)]
    head = f"fixed updates of {found['samples_per_fixed_update']}"
    return table(rows, {"seed": "{key}", head: "{fixed:.3f}", "free-running": "{free:.3f}"})


def quality_summary() -> str:
    found = figures("quality")
    spread, where = found["spread_of_seeds"], "behind" if found["mean_difference"] > 0 else "ahead"
    return (
        f"They end {abs(found['mean_difference']):.3f} {where} on average; seeds differ by {spread['fixed']:.3f} among fixed and "
        f"{spread['free']:.3f} among free runs."
    )


def objective() -> Table:
    ways = {"fewest batches": "fewest", "least time": "time", "least time, a step costs 128": "time, a step costs 128"}
    cell = "{WAY[samples_per_s][median]:.0f} ({WAY[padding]:.0%}, {WAY[batches_per_update]:.1f})"
    cells = {head: cell.replace("WAY", way) for head, way in ways.items()}
    rows = [{"key": name, **found["methods"]} for name, found in figures("objective").items()]
    return table(rows, {"samples/s (padding, batches an update)": "{key}", **cells})


# Running out of memory, inference, faults


def recovery() -> Table:
    calls, work, update = (figures(f"oom_{name}") for name in ("wrapper", "work", "update"))
    beyond = calls["OomSafeBackward"]["median"] - calls["plain backward"]["median"]
    rows = [
        ("`run_with_oom_retry` around a call that fits", "under 20 us", f"{calls['run_with_oom_retry']['median']:.1f} us"),
        ("`generate_with_oom_retry` around a call that fits", "under 20 us",
         f"{calls['generate_with_oom_retry']['median']:.1f} us"),
        ("`OomSafeBackward`, beyond a plain backward pass, one rank", "none", f"{beyond:.0f} us"),
        (f"{work['texts']:,} texts, {work['batches_that_do_not_fit']:.0%} of {work['planned_batches']} planned batches do not "
         "fit, against a run that knew the limit: forward passes, tokens through the model", "at most 1.1x",
         f"{work['ratio']['forward_passes']:.2f}x, {work['ratio']['tokens']:.2f}x; failures: {work['learned']['failures']}"),
        ("the same shape failing twice in a row", "never", str(work["learned"]["failed_twice_in_a_row"] or "never")),
        *((f"forward, backward and exchange of an update ({update['parameters'] / 1e6:.0f} million parameters, "
           f"{update['ranks']} gloo ranks, batches an update: {number}), against DDP's own exchange", "at most 1.08x",
           f"{Spread(found['ratio']):.2fx}, wall time on a busy machine")
          for number, found in update["batches_an_update"].items()),
    ]  # fmt: skip
    return [line("", "target", "reached"), "|" + "---|" * 3, *(line(*row) for row in rows)]


def embed() -> Table:
    rows = rows_of(figures("embed")["methods"])
    return table(rows, {"": "{key}", "CPU s": "{cpu_s[median]:.1f}", "against fixed": "{speed:.2fx}"})


EMBED_SUMMARY = (
    "{texts} docstrings, {tokens:,} tokens of CV {cv:.2f}; "
    "vectors differ by at most {largest_difference_of_vectors:.0e}"
)


def generation() -> Table:
    columns = {
        "": "{key}", "against fixed": "{speed:.2fx}", "batches": "{batches}", "padding of prompts": "{padding:.1%}",
        "largest batch, tokens": "{largest_batch_tokens:,}",
    }  # fmt: skip
    return table(rows_of(figures("generate_rivals")["methods"]), columns)


def faults() -> Table:
    counts = figures("faults")["by_fault"].items()
    return table([{"key": name, "count": count} for name, count in counts], {"fault": "{key}", "cases": "{count}"})


def faults_summary() -> str:
    found = figures("faults")
    findings = f"{len(found['findings'])} findings" if found["findings"] else "nothing found"
    return f"{found['cases']:,} cases, {len(found['by_fault'])} kinds of faults, {findings}"


def ablation() -> Table:
    """What planning loses without each of its mechanisms."""
    rows = rows_of(figures("ablation")["planning"])
    for row in rows:
        uneven = zip(row["uneven_rows"], row["rows"], strict=True)
        row["uneven"] = ", ".join(f"{bad / max(count, 1):.1%}" for bad, count in uneven)
        if row["planning_s"]:
            row["speed"] = row["planning_s"][1] / row["planning_s"][0]
    columns = {
        "without": "{key}", "predicted time: mean": "{more_time_mean:+.2%}", "worst": "{more_time_worst:+.2%}",
        "where": "{worst}", "rows beyond 5 %: now, without": "{uneven}", "CPU time of planning": "{speed:.1f}x",
    }  # fmt: skip
    return table(rows, columns)


ABLATION_ROOMS = {
    "mechanism": "{key}", "lines": "{lines:,}", "what is counted": "{unit}", "with": "{with:.6g}", "without": "{without:.6g}",
    "what stands in": "{instead}",
}  # fmt: skip
ABLATION_HELD = {"mechanism": "{mechanism}", "lines": "{lines:,}", "what would fall": "{holds}", "its test": "`{test}`"}


def sentence(template: str, result: str) -> Callable[[], str]:
    return lambda: template.format_map(figures(result))


FIGURES: dict[str, Callable[[], str | Table]] = {
    **{
        function.__name__: function
        for function in (
            *(
                planning_speed,
                cut,
                efficiency,
                growth,
                shards,
                loader_speed,
                loader_overhead,
                loader_fill,
                ranks,
                protocol,
            ),
            *(demo, demo_speed, rivals, rivals_best, ranks_training, trainer, quality, quality_summary, objective),
            *(recovery, embed, generation, faults, faults_summary),
        )
    },
    "ablation": ablation,
    "ablation_rooms": lambda: table(rows_of(figures("ablation")["rooms"]), ABLATION_ROOMS),
    "ablation_held": lambda: table(figures("ablation")["held"], ABLATION_HELD),
    "planning_memory": sentence("{token_budget_1m_peak_mb_over_input:.0f} MB", "plan_speed"),
    "planning_rival": sentence(PLANNING_RIVAL, "plan_rival"),
    "balance": sentence(BALANCE, "loader_balance"),
    "rivals_updates": lambda: str(figures("train_rivals")["CV 0.8"]["updates"]),
    "embed_summary": sentence(EMBED_SUMMARY, "embed"),
}
"""What stands between marks of that name."""


def pages_with_figures() -> dict[str, str]:
    """The pages with their figures as they are now."""
    pages = {
        name: (ROOT / name).read_text(encoding="utf-8")
        for name in (*MARKED, "README.md", "docs/seq2seq.md", "docs/command-line.md")
    }
    speedup = re.compile(r"[\d.]+x samples/s in the median update \([^)]*\)")
    readme = speedup.sub(demo_speed(), pages["README.md"])
    return {
        **{page: filled(pages[page]) for page in MARKED},
        "README.md": _with_rows(readme, f"| {IN_README[0]} ", padding_rows()),
        "docs/seq2seq.md": _with_rows(pages["docs/seq2seq.md"], "| translation (", streams_rows()),
        "docs/command-line.md": _with_doctor(pages["docs/command-line.md"]),
    }


def filled(page: str) -> str:
    """``page`` with what stands between ``<!-- figures: NAME -->`` and ``<!-- end -->`` written anew."""
    return MARK.sub(lambda found: f"<!-- figures: {found[1]} -->{shown(found[1])}<!-- end -->", page)


def shown(name: str) -> str:
    """A sentence, or a table between empty lines."""
    found = FIGURES[name]()
    return found if isinstance(found, str) else "\n\n" + "\n".join(found) + "\n\n"


def _with_rows(page: str, first: str, rows: Table) -> str:
    """``page`` with the rest of the table from the row that begins with ``first`` replaced."""
    start = page.index("\n" + first) + 1
    return page[:start] + "\n".join(rows) + page[page.index("\n\n", start) :]


def _with_doctor(page: str) -> str:
    """What the example of docs/command-line.md prints."""
    from dynagroup.cli import main

    with redirect_stdout(StringIO()) as printed:
        main([str(ROOT / word) if word.startswith("benchmarks/") else word for word in DOCTOR.split()])
    said = f"$ dynagroup {DOCTOR}\n{printed.getvalue()}"
    return re.sub(r"\$ dynagroup doctor .*?(?=```)", lambda _: said, page, count=1, flags=re.S)


def write() -> None:
    """Write the figures, as they are now, into the pages."""
    for name, text in pages_with_figures().items():
        (ROOT / name).write_text(text, encoding="utf-8")
