"""Figures of README.md and docs, from benchmarks/results. usage: python scripts/doc_tables.py (writes them into the pages)"""

from __future__ import annotations

import json
import re
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


def speed_rows() -> list[str]:
    """One row a task: CPU seconds of planning, median and range."""
    found = _read("plan_speed")["figures"]
    peak = f"1,000,000 lengths, `TokenBudget` ({found['token_budget_1m_peak_mb_over_input']:.0f} MB over the input)"
    names = {
        peak: "token_budget_1m",
        "the same, shuffled in windows": "token_budget_1m_shuffled",
        "10,000,000 lengths": "token_budget_10m",
        "1,000,000 lengths, `MemoryBudget` with the pretrained regressor": "memory_budget_1m_pretrained",
        "1,000,000 samples with two padded streams, sorted by both": "two_padded_streams_1m",
        "first batch of 10,000,000, `window=4096`": "first_batch_of_10m_window_4096",
    }
    return [
        _row(name, "{median_s:.3g} s ({min_s:.3g} to {max_s:.3g})".format_map(found[key]))
        for name, key in names.items()
    ]


def cut_rows() -> list[str]:
    """One row a dataset and number of ranks: cost of the cut over the one before; shares of real tokens before and now."""
    figures = _read("cut")["figures"]
    names = (
        "azure_llm_conv_2023",
        "python_files",
        "mooncake_conv",
        "synth_sharegpt4o",
        "synth_ultrachat",
        "t0_mix_50k",
        "gsm8k",
    )

    def cell(found: dict[str, dict[str, float]]) -> str:
        before, now = found["before"], found["now"]
        return f"**{now['cost'] / before['cost']:.2f}** ({before['real_share']:.2f} → {now['real_share']:.2f})"

    groups = (16, 32, 64, 256, "free")
    return [
        _row(name, str(ranks), *(cell(figures[f"{name}/{group}/{ranks}"]) for group in groups))
        for ranks in (1, 8)
        for name in names
    ]


def shard_rows() -> list[str]:
    """One row a dataset: critical path of shards over the rival's, both over their bound, and micro-batches."""
    figures = _read("shards")["figures"]

    def cells(found: dict[str, float]) -> tuple[str, str]:
        path = f"{found['critical_path']:.2f} ({found['over_bound']:.3f}, {found['rival_over_bound']:.3f})"
        return path, f"{found['micro_batches']:.0f}, {found['rival_micro_batches']:.0f}"

    names = [key.removesuffix("/packed") for key in figures if key.endswith("/packed")]
    return [_row(n, *cells(figures[f"{n}/packed"]), *cells(figures[f"{n}/padded"])) for n in names]


def objective_rows() -> list[str]:
    """One row a training: samples a second of the fewest batches and of least time."""
    return [
        _row(name, *(f"{run['samples_per_s']:.0f} ({run['padding']:.0%}, {run['steps']})" for run in runs.values()))
        for name, runs in _read("objective")["figures"].items()
    ]


def planning(page: str) -> str:
    """docs/planning.md with its tables as they are now."""
    page = _with_table(page, "| lengths | ranks | updates of 16 |", cut_rows())
    page = _with_table(page, "| samples/s (padding, steps) |", objective_rows())
    return _with_table(page, "| lengths | packed | micro-batches |", shard_rows())


def _with_table(page: str, header: str, rows: list[str]) -> str:
    """``page`` with all rows of the table that begins with ``header`` replaced."""
    start = page.index("\n", page.index("\n", page.index("\n" + header) + 1) + 1) + 1
    return page[:start] + "".join(row + "\n" for row in rows) + page[page.index("\n\n", start - 1) + 1 :]


def pages() -> dict[str, str]:
    """The pages with their figures as they are now."""
    readme, benchmarks, shell = (
        (ROOT / name).read_text(encoding="utf-8")
        for name in ("README.md", "docs/benchmarks.md", "docs/command-line.md")
    )
    sentence = re.compile(r"[\d.]+x samples/s in the median update \([^)]*\)")
    benchmarks = _with_rows(benchmarks, "| fixed batches of", demo_rows())
    benchmarks = _with_table(benchmarks, "| | CPU time |", speed_rows())
    return {
        "README.md": _with_rows(sentence.sub(demo_sentence(), readme), f"| {SHOWN[0]} ", padding_rows()),
        "docs/benchmarks.md": _with_rows(
            sentence.sub(demo_sentence(), benchmarks), "| azure_llm_code_2023 | 0.", efficiency_rows()
        ),
        "docs/planning.md": planning((ROOT / "docs/planning.md").read_text(encoding="utf-8")),
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


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _padding(found: tuple[float, int]) -> str:
    efficiency, steps = found
    return f"{1 - efficiency:.1%}, {steps:,}"


if __name__ == "__main__":
    for name, text in pages().items():
        (ROOT / name).write_text(text, encoding="utf-8")
