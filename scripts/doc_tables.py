"""Figures of README.md and docs, from benchmarks/results. usage: python scripts/doc_tables.py (writes them into the pages)"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ALL_COLUMNS = (
    *("fixed_16_shuffled", "hf_group_by_length_16", "dynagroup_whole_set"),
    *("dynagroup_window_50_batches", "dynagroup_shuffle", "dynagroup_update_of_256"),
)
DOCTOR = (
    "doctor benchmarks/lengths/azure_llm_conv_2023.npz --column tokens --max-length 4k --batch-size 8 --world-size 4"
)
SHOWN = ("gsm8k", "azure_llm_conv_2023", "t0_mix_50k", "mooncake_conv", "python_files")
COLUMNS = (
    *("fixed_16_shuffled", "hf_group_by_length_16"),
    *("dynagroup_update_of_256", "dynagroup_shuffle", "dynagroup_whole_set"),
)


def padding_rows() -> list[str]:
    """One row a dataset: name and variation of its lengths, then padding and steps of each method."""
    figures = _read("plan_padding")["figures"]
    return [
        _row(f"{name} (CV {figures[name]['cv']:.2f})", *(_padding(figures[name][column]) for column in COLUMNS))
        for name in SHOWN
    ]


def efficiency_rows() -> list[str]:
    """One row a dataset: real tokens over padded tokens, and steps, of each method."""
    figures = _read("plan_padding")["figures"]
    return [
        _row(name, f"{found['cv']:.2f}", *(f"{found[column][0]:.3f}, {found[column][1]:,}" for column in ALL_COLUMNS))
        for name, found in sorted(figures.items())
    ]


def demo_rows() -> list[str]:
    """One row a run of the demo."""
    return [
        _row(
            name,
            f"{run['samples_per_s']:.0f}",
            f"{run['real_tokens_per_s']:,.0f}",
            f"{run['padding']:.1%}",
            f"{run['largest_batch_tokens']:,}",
            *(str(run[key]) for key in ("steps", "updates")),
            f"{run['seconds']:.0f}",
            f"{run['held_out_loss']:.4f}",
        )
        for name, run in _read("demo_cpu")["runs"].items()
    ]


def demo_sentence() -> str:
    """How much faster, with its spread."""
    figures = _read("demo_cpu")
    low, high = figures["speedup_quartiles"]
    return f"{figures['speedup']:.2f}x samples/s in the median update (middle half: {low:.2f}x to {high:.2f}x)"


def streams_rows() -> list[str]:
    """One row a set of pairs: padding of both streams, sorted by the first and by both, and the time that is left of it."""
    return [
        _row(
            f"{name} ({found['what']})",
            *(
                f"{way['by_first_stream']['padding']:.0%} -> {way['by_both']['padding']:.0%}, {way['share_of_time']:.2f}"
                for way in (found[label] for label in ("updates of 256", "windows of 4,096", "sorted whole"))
            ),
        )
        for name, found in _read("streams")["figures"]["pairs"].items()
    ]


def doctor_output() -> str:
    """What the example of docs/command-line.md prints."""
    from dynagroup.cli import main

    with redirect_stdout(StringIO()) as printed:
        main([str(ROOT / word) if word.startswith("benchmarks/") else word for word in DOCTOR.split()])
    return printed.getvalue()


def pages() -> dict[str, str]:
    """The pages with their figures as they are now."""
    readme, shell = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/command-line.md"))
    sentence = re.compile(r"[\d.]+x samples/s in the median update \([^)]*\)")
    marked = {page: filled((ROOT / page).read_text(encoding="utf-8")) for page in MARKED}
    return {
        **marked,
        "README.md": _with_rows(sentence.sub(demo_sentence(), readme), f"| {SHOWN[0]} ", padding_rows()),
        "docs/seq2seq.md": _with_rows(
            (ROOT / "docs/seq2seq.md").read_text(encoding="utf-8"), "| translation (", streams_rows()
        ),
        "docs/command-line.md": re.sub(
            r"\$ dynagroup doctor .*?(?=```)",
            lambda _: f"$ dynagroup {DOCTOR}\n{doctor_output()}",
            shell,
            count=1,
            flags=re.S,
        ),
    }


def filled(page: str) -> str:
    """``page`` with what stands between ``<!-- figures: NAME -->`` and ``<!-- end -->`` written anew."""
    return MARK.sub(lambda found: f"<!-- figures: {found[1]} -->{shown(found[1])}<!-- end -->", page)


def shown(name: str) -> str:
    """A sentence, or a table between empty lines."""
    found = FIGURES[name]()
    return found if isinstance(found, str) else "\n\n" + "\n".join(found) + "\n\n"


MARK = re.compile(r"<!-- figures: (\w+) -->.*?<!-- end -->", re.S)
MARKED = ("docs/benchmarks.md", "docs/alignment.md", "docs/planning.md")


def _with_rows(page: str, first: str, rows: list[str]) -> str:
    """``page`` with the rest of the table from the row that begins with ``first`` replaced."""
    start = page.index("\n" + first) + 1
    return page[:start] + "\n".join(rows) + page[page.index("\n\n", start) :]


def packing_rows(dataset: str) -> list[str]:
    """One row a way of packing: what it makes of a data set; its time is relative to the first row's."""
    found = _read("pack")["figures"]["files"][dataset]["methods"]
    first = next(iter(found.values()))["critical_path"]
    return [
        _row(
            name,
            f"{run['steps']:,}",
            f"{run['fill']:.1%}",
            f"{run['row_imbalance']:.2f}",
            f"{run['samples_cut']:,}",
            f"{run['samples_dropped']:,}",
            "yes" if run["same_updates"] else "no",
            f"{run['critical_path'] / first:.2f}",
        )
        for name, run in found.items()
    ]


def speed_rows() -> list[str]:
    """One row a planning task: CPU seconds, least to most."""
    figures = _read("plan_speed")["figures"]
    named = {
        "1,000,000 lengths, `TokenBudget`": "token_budget_1m",
        "the same, `shuffle=True`": "token_budget_1m_shuffled",
        "10,000,000 lengths": "token_budget_10m",
        "1,000,000 lengths, `MemoryBudget` with the pretrained regressor": "memory_budget_1m_pretrained",
        "1,000,000 samples with two padded streams, sorted by both": "two_padded_streams_1m",
        "first batch of 10,000,000, `window=4096`": "first_batch_of_10m_window_4096",
    }
    spread = lambda f: f"{f['median_s']:.3g} s ({f['min_s']:.3g} to {f['max_s']:.3g})"  # noqa: E731
    return [_row("", "CPU time"), _rule(2), *(_row(name, spread(figures[key])) for name, key in named.items())]


def speed_memory() -> str:
    return f"{_read('plan_speed')['figures']['token_budget_1m_peak_mb_over_input']:.0f} MB"


def rival_sentence() -> str:
    """dynabatch's planning time beside ours."""
    figures = _read("plan_rival")["figures"]
    small, large = (figures[f"batch_size_{n}"] for n in (8, 32))
    theirs, ours = (
        [f"{case[who]['median_s']:.3g} s" for case in (small, large)] for who in ("dynabatch", "memory_budget")
    )
    times = [f"{case['times_faster_memory_budget']:.0f}" for case in (small, large)]
    tokens = [f"{case['times_faster_token_budget']:,.0f}" for case in (small, large)]
    return (
        f"dynabatch 0.2.23 needs {theirs[0]} for {figures['samples']:,} lengths at batch size 8 and {theirs[1]} at 32 "
        f"(one run each); with `MemoryBudget` the same plans take {ours[0]} and {ours[1]}: {times[0]} and {times[1]} times "
        f"less; with `TokenBudget` {tokens[0]} and {tokens[1]} times less."
    )


def efficiency_table() -> list[str]:
    head = ("lengths", "CV", "fixed 16, shuffled", "HF `group_by_length`", "sorted", "`window` of 50 batches")
    head += ("`shuffle=True`", "`samples_per_update=256`")
    return [_row(*head), _rule(len(head)), *efficiency_rows()]


def demo_table() -> list[str]:
    head = ("", "samples/s", "real tokens/s", "padding", "largest batch", "steps", "updates", "CPU s", "held-out loss")
    return [_row(*head), _rule(len(head)), *demo_rows()]


def growth_rows() -> list[str]:
    """One row a cost: its least and largest, and the exponent between."""
    rows = []
    for name, found in _read("growth")["figures"].items():
        sizes = f"{found['sizes'][0]:,} to {found['sizes'][-1]:,} {found['over']}"
        costs = f"{_short(found['costs'][0])} to {_short(found['costs'][-1])} {found['unit']}"
        rows.append(_row(name, sizes, costs, f"{found['exponent']:.2f}"))
    return [_row("", "over", "from, to", "exponent"), _rule(4), *rows]


def rivals_rows() -> list[str]:
    """One row a variation of lengths and method of training; samples a second only where all had the same ones."""
    rows = []
    for case, found in _read("train_rivals")["figures"].items():
        fixed = found["methods"]["fixed"]
        base = fixed["samples_per_s"]["median"]
        for name, one in found["methods"].items():
            middle, low, high = (
                f"{value / base:.2f}" for value in (one["samples_per_s"]["median"], *one["samples_per_s"]["quartiles"])
            )
            rows.append(
                _row(
                    case, name, f"{one['real_tokens_per_s'] / fixed['real_tokens_per_s']:.2f}x",
                    f"{middle}x ({low} to {high})" if one["same_updates"] else "",
                    f"{one['padding']:.1%}", f"{one['batches_per_update']:.1f}",
                    f"{one['held_out_loss']:.4f}" if one["same_updates"] else "", "yes" if one["same_updates"] else "no",
                )
            )  # fmt: skip
    head = ("lengths", "method", "real tokens/s over fixed", "samples/s over fixed (quartiles)", "padding")
    return [_row(*head, "batches an update", "held-out loss", "same updates"), _rule(8), *rows]


def rivals_updates() -> str:
    return str(_read("train_rivals")["figures"]["CV 0.8"]["updates"])


def rivals_sentence() -> str:
    """Where ours is fastest among those that keep the updates, and where not."""
    said = []
    for case, found in _read("train_rivals")["figures"].items():
        same = {name: one["samples_per_s"]["median"] for name, one in found["methods"].items() if one["same_updates"]}
        rivals = {name: speed for name, speed in same.items() if not name.startswith("dynagroup")}
        best = max(rivals, key=lambda name: rivals[name])
        said.append(f"{case}: {same['dynagroup'] / rivals[best]:.2f} times the best of them ({best})")
    return "; ".join(said)


def fault_rows() -> list[str]:
    found = _read("faults")["figures"]["by_fault"]
    return [_row("fault", "cases"), _rule(2), *(_row(name, str(count)) for name, count in found.items())]


def fault_sentence() -> str:
    found = _read("faults")["figures"]
    findings = f"{len(found['findings'])} findings" if found["findings"] else "nothing found"
    return f"{found['cases']:,} cases, {len(found['by_fault'])} kinds of faults, {findings}"


def loader_rows() -> list[str]:
    figures = _read("loader_speed")["figures"]
    rows = []
    for name in (name for name in figures if " / " not in name):
        over = [
            figures.get(f"{name} / {peer}") for peer in ("plain, 16 a batch", "online-dynamic-batching, window 256")
        ]
        ratios = [
            "" if r is None else f"{r['median']:.1f}x ({r['quartiles'][0]:.1f} to {r['quartiles'][1]:.1f})"
            for r in over
        ]
        speeds = ", ".join(f"{value:,}" for value in figures[name]["samples_per_cpu_s"])
        rows.append(_row(name, speeds, f"{figures[name]['real_share']:.3f}", *ratios))
    head = ("loader", "samples a CPU second, each turn", "real / padded tokens", "against plain")
    return [_row(*head, "against online-dynamic-batching"), _rule(5), *rows]


def overhead_sentence() -> str:
    found = _read("loader_overhead")["figures"]
    step, cut = found["microseconds_a_step"], found["milliseconds_to_cut_1024"]
    low, high = step["quartiles"]
    return (
        f"{step['median']:.0f} microseconds a step on one rank ({low:.0f} to {high:.0f}); cutting a window of 1,024: "
        f"{cut['median']:.2f} ms"
    )


def fill_rows() -> list[str]:
    cell = lambda found: f"{found['real_share']:.3f}, {found['steps']} steps" if found else ""  # noqa: E731
    columns = ("dynagroup 256", "online-dynamic-batching 256", "dynagroup 1024")
    rows = [
        _row(name, *(cell(found.get(column)) for column in columns))
        for name, found in _read("loader_fill")["figures"].items()
        if "budget" in found
    ]
    head = ("lengths", "dynagroup, window 256", "online-dynamic-batching, window 256", "dynagroup, window 1,024")
    return [_row(*head), _rule(4), *rows]


def ranks_rows() -> list[str]:
    """One row a simulation: the largest of every file, all of the one with most."""
    rows = []
    for name, runs in _read("loader_ranks")["figures"]["windows"].items():
        for run in runs if len(runs) > 3 else runs[-1:]:
            rows.append(
                _row(
                    name, f"{run['ranks']:,}", f"{run['samples_a_rank']:,}", f"{run['above_all_batches_over_ranks']:.1%}",
                    f"{run['above_with_fixed_shards']:.1%}", f"{run['idle_share_before_splitting']:.1%}",
                    str(run["exchanges"]), f"{run['bytes_a_rank_a_step']:.0f}",
                )
            )  # fmt: skip
    head = ("lengths", "ranks", "samples a rank", "this protocol", "fixed shards", "idle before splitting", "exchanges")
    return [_row(*head, "bytes a rank a step"), _rule(8), *rows]


def protocol_rows() -> list[str]:
    """One row a number of ranks, at 16,000 samples a rank of CV 1.0."""
    runs = [r for r in _read("loader_ranks")["figures"]["windows"]["synth_sharegpt4o"] if r["samples_a_rank"] == 16_000]
    rows = [
        _row(
            f"{run['ranks']:,}", f"{run['above_all_batches_over_ranks']:.1%}", f"{run['above_with_fixed_shards']:.1%}",
            f"{run['above_with_alignment_of_every_window']:.1%}", str(run["exchanges"]), f"{run['bytes_a_rank_a_step']:.0f}",
        )
        for run in runs if run["ranks"] > 1
    ]  # fmt: skip
    head = ("ranks", "this protocol", "fixed shards, aligned at the end", "every window aligned", "exchanges an epoch")
    return [_row(*head, "bytes a rank a step"), _rule(6), *rows]


def learned_sentence() -> str:
    rows = _read("loader_learned")["figures"]["rows"]
    most = max(row["above_all_batches_over_ranks"] for row in rows)
    return f"{most:.1%} above at {min(r['ranks'] for r in rows)} to {max(r['ranks'] for r in rows)} ranks"


def balance_sentence() -> str:
    found = _read("loader_balance")["figures"]
    first, later = found["windows"], found["learned lengths"]
    return (
        f"the dearest rank of a step takes {first['row_imbalance']:.1%} more predicted time than the mean rank in the first "
        f"epoch ({first['if_ranks_shuffled_apart']:.0%} if each rank shuffled by itself), {later['row_imbalance']:.1%} once "
        "lengths are learned"
    )


def ranks_training_rows() -> list[str]:
    figures = _read("loader_train")["figures"]
    named = {"fixed batches": "fixed", "`samples_per_update=128`": "update", "free-running": "free"}
    rows = []
    for name, key in named.items():
        found = figures[key]
        low, high = min(found["speed_over_fixed"]), max(found["speed_over_fixed"])
        speeds = ", ".join(f"{value:.0f}" for value in sorted(found["samples_per_s"]))
        rows.append(_row(name, speeds, f"{low:.2f}x to {high:.2f}x", f"{found['held_out_loss']:.3f}", str(found["updates"]),
                         str(found["steps"])))  # fmt: skip
    return [_row("", "samples/s", "against fixed", "held-out loss", "updates", "steps"), _rule(6), *rows]


def recovery_rows() -> list[str]:
    calls, work = _read("oom_wrapper")["figures"], _read("oom_work")["figures"]["ratio"]
    runs, update = _read("oom_generation")["figures"], _read("oom_update")["figures"]
    beyond = calls["OomSafeBackward"]["median"] - calls["plain backward"]["median"]
    share = runs["planned_batches_that_do_not_fit"]
    lines = [
        ("`run_with_oom_retry` around a call that fits", "under 20 us", f"{calls['run_with_oom_retry']['median']:.1f} us"),
        ("`generate_with_oom_retry` around a call that fits", "under 20 us",
         f"{calls['generate_with_oom_retry']['median']:.1f} us"),
        ("`OomSafeBackward`, beyond a plain backward pass, one rank", "none", f"{beyond:.0f} us"),
        (f"{runs['texts']:,} texts, {share:.0%} of {runs['planned_batches']} planned batches do not fit, against a run that "
         "knew the limit", "at most 1.1x", f"{_ratio(runs['ratio'])}, {runs['out_of_memory_errors']} failure"),
        ("the same two runs counted instead of timed: forward passes, tokens through the model", "at most 1.1x",
         f"{work['forward_passes']:.2f}x, {work['tokens']:.2f}x"),
        ("the same shape failing twice in a row", "never",
         "yes" if runs["same_shape_failed_twice_in_a_row"] else "never"),
        (f"an update of 12.6 million parameters on {update['ranks']} gloo ranks, against DDP's own exchange", "none",
         f"{_ratio(update['ratio'])}, wall time on a busy machine"),
    ]  # fmt: skip
    return [_row("", "target", "reached"), _rule(3), *(_row(*line) for line in lines)]


def embed_rows() -> list[str]:
    figures = _read("embed")["figures"]
    rows = [
        _row(name, f"{one['cpu_s']['median']:.1f}", _ratio(one["speed"])) for name, one in figures["methods"].items()
    ]
    return [_row("", "CPU s", "against fixed"), _rule(3), *rows]


def embed_sentence() -> str:
    found = _read("embed")["figures"]
    return (
        f"{found['texts']} docstrings, {found['tokens']:,} tokens of CV {found['cv']:.2f}; vectors differ by at most "
        f"{found['largest_difference_of_vectors']:.0e}"
    )


def generation_rows() -> list[str]:
    figures = _read("generate_rivals")["figures"]
    rows = [
        _row(
            name, _ratio(one["speed"]), str(one["batches"]), f"{one['padding']:.1%}", f"{one['largest_batch_tokens']:,}"
        )
        for name, one in figures["methods"].items()
    ]
    return [_row("", "against fixed", "batches", "padding of prompts", "largest batch, tokens"), _rule(5), *rows]


def trainer_rows() -> list[str]:
    figures = _read("trainer")["figures"]
    named = {
        "a plain Trainer over another (control)": "plain_over_plain",
        "dynagroup over plain, equal batches": "equal_batches",
        "the same with a model of one layer of 8, where the adapter is not lost in noise": "tiny_equal_batches",
        "dynagroup over plain, lengths like texts (lognormal, 8 to 128 tokens)": "texts",
    }
    rows = []
    for name, key in named.items():
        found = figures[key]
        low, high = found["ratio"]["quartiles"]
        sure = found["ratio"]["median_95"]
        difference = found["difference_ms"]["median"]
        rows.append(_row(name, f"{found['ratio']['median']:.3f} ({low:.3f} to {high:.3f})", f"{sure[0]:.3f} to {sure[1]:.3f}",
                         f"{difference:.1f} ms"))  # fmt: skip
    head = ("", "median ratio (quartiles)", "95 % interval of the median", "difference an update")
    return [_row(*head), _rule(4), *rows]


def quality_rows() -> list[str]:
    found = _read("quality")["figures"]
    losses = found["held_out_loss"]
    rows = [
        _row(str(seed), f"{fixed:.3f}", f"{free:.3f}")
        for seed, (fixed, free) in enumerate(zip(losses["fixed"], losses["free"], strict=True))
    ]
    return [_row("seed", f"fixed updates of {found['samples_per_fixed_update']}", "free-running"), _rule(3), *rows]


def quality_sentence() -> str:
    found = _read("quality")["figures"]
    spread = found["spread_of_seeds"]
    where = "behind" if found["mean_difference"] > 0 else "ahead"
    return (
        f"They end {abs(found['mean_difference']):.3f} {where} on average; seeds differ by {spread['fixed']:.3f} among fixed and "
        f"{spread['free']:.3f} among free runs."
    )


def cut_rows() -> list[str]:
    """One row a data set and number of ranks: predicted cost against the cut into fewest batches, and shares of real tokens."""
    figures = _read("cut")["figures"]
    sizes = list(dict.fromkeys(name.split("/")[1] for name in figures))
    files = (
        "azure_llm_conv_2023",
        "python_files",
        "mooncake_conv",
        "synth_sharegpt4o",
        "synth_ultrachat",
        "t0_mix_50k",
        "gsm8k",
    )
    rows = []
    for ranks in ("1", "8"):
        for name in files:
            found = [figures[f"{name}/{size}/{ranks}"] for size in sizes]
            costs = [f["now"]["cost"] / f["before"]["cost"] for f in found]
            shares = [f"{f['before']['real_share']:.2f} → {f['now']['real_share']:.2f}" for f in found]
            cells = [f"**{cost:.2f}** ({share})" for cost, share in zip(costs, shares, strict=True)]
            rows.append(_row(name, ranks, *cells))
    head = [f"updates of {sizes[0]}", *("free" if not size.isdigit() else size for size in sizes[1:])]
    return [_row("lengths", "ranks", *head), _rule(2 + len(sizes)), *rows]


def shards_rows() -> list[str]:
    """One row a data set: critical path of shards over the rival's, both over their bound, and micro-batches."""
    figures = _read("shards")["figures"]

    def cells(found: dict[str, float]) -> tuple[str, str]:
        path = f"{found['critical_path']:.2f} ({found['over_bound']:.3f}, {found['rival_over_bound']:.3f})"
        return path, f"{found['micro_batches']:.0f}, {found['rival_micro_batches']:.0f}"

    names = [key.removesuffix("/packed") for key in figures if key.endswith("/packed")]
    rows = [_row(n, *cells(figures[f"{n}/packed"]), *cells(figures[f"{n}/padded"])) for n in names]
    return [_row("lengths", "packed", "micro-batches", "padded", "micro-batches"), _rule(5), *rows]


def objective_rows() -> list[str]:
    """One row a training: samples a second of the fewest batches and of least time."""
    rows = [
        _row(name, *(f"{run['samples_per_s']:.0f} ({run['padding']:.0%}, {run['steps']})" for run in runs.values()))
        for name, runs in _read("objective")["figures"].items()
    ]
    head = ("samples/s (padding, steps)", "fewest batches", "least time", "least time, a step costs 128")
    return [_row(*head), _rule(4), *rows]


FIGURES: dict[str, Callable[[], str | list[str]]] = {
    "planning_speed": speed_rows, "planning_memory": speed_memory, "planning_rival": rival_sentence, "cut": cut_rows,
    "efficiency": efficiency_table, "growth": growth_rows, "generation": generation_rows,
    "demo": demo_table, "demo_speed": demo_sentence,
    "rivals": rivals_rows, "rivals_updates": rivals_updates, "rivals_best": rivals_sentence, "faults": fault_rows,
    "faults_summary": fault_sentence, "loader_speed": loader_rows, "loader_overhead": overhead_sentence,
    "loader_fill": fill_rows, "ranks": ranks_rows, "protocol": protocol_rows, "ranks_learned": learned_sentence,
    "balance": balance_sentence, "ranks_training": ranks_training_rows, "recovery": recovery_rows, "embed": embed_rows,
    "embed_summary": embed_sentence, "trainer": trainer_rows, "quality": quality_rows,
    "quality_summary": quality_sentence, "shards": shards_rows,
    "objective": objective_rows,
}  # fmt: skip
"""What stands between marks of that name."""


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return "|" + "---|" * columns


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(found: dict[str, Any]) -> str:
    return f"{found['median']:.2f}x ({found['quartiles'][0]:.2f} to {found['quartiles'][1]:.2f})"


def _padding(found: tuple[float, int]) -> str:
    efficiency, steps = found
    return f"{1 - efficiency:.1%}, {steps:,}"


if __name__ == "__main__":
    for name, text in pages().items():
        (ROOT / name).write_text(text, encoding="utf-8")
