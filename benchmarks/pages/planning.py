"""Figures of planning: padding and steps of a plan, how long planning takes, packing and shards."""

from __future__ import annotations

from benchmarks.pages.cells import read, row, rule, short

ALL_COLUMNS = (
    *("fixed_16_shuffled", "hf_group_by_length_16", "dynagroup_whole_set"),
    *("dynagroup_window_50_batches", "dynagroup_shuffle", "dynagroup_update_of_256"),
)
SHOWN = ("gsm8k", "azure_llm_conv_2023", "t0_mix_50k", "mooncake_conv", "python_files")
COLUMNS = (
    *("fixed_16_shuffled", "hf_group_by_length_16"),
    *("dynagroup_update_of_256", "dynagroup_shuffle", "dynagroup_whole_set"),
)


def padding_rows() -> list[str]:
    """One row a dataset: name and variation of its lengths, then padding and steps of each method."""
    figures = read("plan_padding")["figures"]
    return [
        row(f"{name} (CV {figures[name]['cv']:.2f})", *(padding(figures[name][column]) for column in COLUMNS))
        for name in SHOWN
    ]


def efficiency_rows() -> list[str]:
    """One row a dataset: real tokens over padded tokens, and steps, of each method."""
    figures = read("plan_padding")["figures"]
    return [
        row(name, f"{found['cv']:.2f}", *(f"{found[column][0]:.3f}, {found[column][1]:,}" for column in ALL_COLUMNS))
        for name, found in sorted(figures.items())
    ]


def efficiency_table() -> list[str]:
    head = ("lengths", "CV", "fixed 16, shuffled", "HF `group_by_length`", "sorted", "`window` of 50 batches")
    head += ("`shuffle=True`", "`samples_per_update=256`")
    return [row(*head), rule(len(head)), *efficiency_rows()]


def streams_rows() -> list[str]:
    """One row a set of pairs: padding of both streams, sorted by the first and by both, and the time that is left of it."""
    return [
        row(
            f"{name} ({found['what']})",
            *(
                f"{way['by_first_stream']['padding']:.0%} -> {way['by_both']['padding']:.0%}, {way['share_of_time']:.2f}"
                for way in (found[label] for label in ("updates of 256", "windows of 4,096", "sorted whole"))
            ),
        )
        for name, found in read("streams")["figures"]["pairs"].items()
    ]


def packing_rows(dataset: str) -> list[str]:
    """One row a way of packing: what it makes of a data set; its time is relative to the first row's."""
    found = read("pack")["figures"]["files"][dataset]["methods"]
    first = next(iter(found.values()))["critical_path"]
    return [
        row(
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
    figures = read("plan_speed")["figures"]
    named = {
        "1,000,000 lengths, `TokenBudget`": "token_budget_1m",
        "the same, `shuffle=True`": "token_budget_1m_shuffled",
        "10,000,000 lengths": "token_budget_10m",
        "1,000,000 lengths, `MemoryBudget` with the pretrained regressor": "memory_budget_1m_pretrained",
        "1,000,000 samples with two padded streams, sorted by both": "two_padded_streams_1m",
        "first batch of 10,000,000, `window=4096`": "first_batch_of_10m_window_4096",
    }
    spread = lambda f: f"{f['median_s']:.3g} s ({f['min_s']:.3g} to {f['max_s']:.3g})"  # noqa: E731
    return [row("", "CPU time"), rule(2), *(row(name, spread(figures[key])) for name, key in named.items())]


def speed_memory() -> str:
    return f"{read('plan_speed')['figures']['token_budget_1m_peak_mb_over_input']:.0f} MB"


def rival_sentence() -> str:
    """dynabatch's planning time beside ours."""
    figures = read("plan_rival")["figures"]
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


def growth_rows() -> list[str]:
    """One row a cost: its least and largest, and the exponent between."""
    rows = []
    for name, found in read("growth")["figures"].items():
        sizes = f"{found['sizes'][0]:,} to {found['sizes'][-1]:,} {found['over']}"
        costs = f"{short(found['costs'][0])} to {short(found['costs'][-1])} {found['unit']}"
        rows.append(row(name, sizes, costs, f"{found['exponent']:.2f}"))
    return [row("", "over", "from, to", "exponent"), rule(4), *rows]


def cut_rows() -> list[str]:
    """One row a data set and number of ranks: predicted cost against the cut into fewest batches, and shares of real tokens."""
    figures = read("cut")["figures"]
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
            rows.append(row(name, ranks, *cells))
    head = [f"updates of {sizes[0]}", *("free" if not size.isdigit() else size for size in sizes[1:])]
    return [row("lengths", "ranks", *head), rule(2 + len(sizes)), *rows]


def shards_rows() -> list[str]:
    """One row a data set: critical path of shards over the rival's, both over their bound, and micro-batches."""
    figures = read("shards")["figures"]

    def cells(found: dict[str, float]) -> tuple[str, str]:
        path = f"{found['critical_path']:.2f} ({found['over_bound']:.3f}, {found['rival_over_bound']:.3f})"
        return path, f"{found['micro_batches']:.0f}, {found['rival_micro_batches']:.0f}"

    names = [key.removesuffix("/packed") for key in figures if key.endswith("/packed")]
    rows = [row(n, *cells(figures[f"{n}/packed"]), *cells(figures[f"{n}/padded"])) for n in names]
    return [row("lengths", "packed", "micro-batches", "padded", "micro-batches"), rule(5), *rows]


def padding(found: tuple[float, int]) -> str:
    efficiency, steps = found
    return f"{1 - efficiency:.1%}, {steps:,}"
