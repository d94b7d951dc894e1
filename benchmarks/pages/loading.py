"""Figures of the loaders: speed, fill, what a step costs, and how ranks end together."""

from __future__ import annotations

from benchmarks.pages.cells import read, row, rule


def loader_rows() -> list[str]:
    figures = read("loader_speed")["figures"]
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
        rows.append(row(name, speeds, f"{figures[name]['real_share']:.3f}", *ratios))
    head = ("loader", "samples a CPU second, each turn", "real / padded tokens", "against plain")
    return [row(*head, "against online-dynamic-batching"), rule(5), *rows]


def overhead_sentence() -> str:
    found = read("loader_overhead")["figures"]
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
        row(name, *(cell(found.get(column)) for column in columns))
        for name, found in read("loader_fill")["figures"].items()
        if "budget" in found
    ]
    head = ("lengths", "dynagroup, window 256", "online-dynamic-batching, window 256", "dynagroup, window 1,024")
    return [row(*head), rule(4), *rows]


def ranks_rows() -> list[str]:
    """One row a simulation: the largest of every file, all of the one with most."""
    rows = []
    for name, runs in read("loader_ranks")["figures"]["windows"].items():
        for run in runs if len(runs) > 3 else runs[-1:]:
            rows.append(
                row(
                    name, f"{run['ranks']:,}", f"{run['samples_a_rank']:,}", f"{run['above_all_batches_over_ranks']:.1%}",
                    f"{run['above_with_fixed_shards']:.1%}", f"{run['idle_share_before_splitting']:.1%}",
                    str(run["exchanges"]), f"{run['bytes_a_rank_a_step']:.0f}",
                )
            )  # fmt: skip
    head = ("lengths", "ranks", "samples a rank", "this protocol", "fixed shards", "idle before splitting", "exchanges")
    return [row(*head, "bytes a rank a step"), rule(8), *rows]


def protocol_rows() -> list[str]:
    """One row a number of ranks, at 16,000 samples a rank of CV 1.0."""
    runs = [r for r in read("loader_ranks")["figures"]["windows"]["synth_sharegpt4o"] if r["samples_a_rank"] == 16_000]
    rows = [
        row(
            f"{run['ranks']:,}", f"{run['above_all_batches_over_ranks']:.1%}", f"{run['above_with_fixed_shards']:.1%}",
            f"{run['above_with_alignment_of_every_window']:.1%}", str(run["exchanges"]), f"{run['bytes_a_rank_a_step']:.0f}",
        )
        for run in runs if run["ranks"] > 1
    ]  # fmt: skip
    head = ("ranks", "this protocol", "fixed shards, aligned at the end", "every window aligned", "exchanges an epoch")
    return [row(*head, "bytes a rank a step"), rule(6), *rows]


def learned_sentence() -> str:
    rows = read("loader_learned")["figures"]["rows"]
    most = max(row["above_all_batches_over_ranks"] for row in rows)
    return f"{most:.1%} above at {min(r['ranks'] for r in rows)} to {max(r['ranks'] for r in rows)} ranks"


def balance_sentence() -> str:
    found = read("loader_balance")["figures"]
    first, later = found["windows"], found["learned lengths"]
    return (
        f"the dearest rank of a step takes {first['row_imbalance']:.1%} more predicted time than the mean rank in the first "
        f"epoch ({first['if_ranks_shuffled_apart']:.0%} if each rank shuffled by itself), {later['row_imbalance']:.1%} once "
        "lengths are learned"
    )
