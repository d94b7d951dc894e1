"""Figures of trainings: the demo, other methods, other trainers, several ranks, quality."""

from __future__ import annotations

from benchmarks.pages.cells import read, row, rule


def demo_rows() -> list[str]:
    """One row a run of the demo."""
    return [
        row(
            name,
            f"{run['samples_per_s']:.0f}",
            f"{run['real_tokens_per_s']:,.0f}",
            f"{run['padding']:.1%}",
            f"{run['largest_batch_tokens']:,}",
            *(str(run[key]) for key in ("steps", "updates")),
            f"{run['seconds']:.0f}",
            f"{run['held_out_loss']:.4f}",
        )
        for name, run in read("demo_cpu")["runs"].items()
    ]


def demo_table() -> list[str]:
    head = ("", "samples/s", "real tokens/s", "padding", "largest batch", "steps", "updates", "CPU s", "held-out loss")
    return [row(*head), rule(len(head)), *demo_rows()]


def demo_sentence() -> str:
    """How much faster, with its spread."""
    figures = read("demo_cpu")
    low, high = figures["speedup_quartiles"]
    return f"{figures['speedup']:.2f}x samples/s in the median update (middle half: {low:.2f}x to {high:.2f}x)"


def rivals_rows() -> list[str]:
    """One row a variation of lengths and method of training; samples a second only where all had the same ones."""
    rows = []
    for case, found in read("train_rivals")["figures"].items():
        fixed = found["methods"]["fixed"]
        base = fixed["samples_per_s"]["median"]
        for name, one in found["methods"].items():
            middle, low, high = (
                f"{value / base:.2f}" for value in (one["samples_per_s"]["median"], *one["samples_per_s"]["quartiles"])
            )
            rows.append(
                row(
                    case, name, f"{one['real_tokens_per_s'] / fixed['real_tokens_per_s']:.2f}x",
                    f"{middle}x ({low} to {high})" if one["same_updates"] else "",
                    f"{one['padding']:.1%}", f"{one['batches_per_update']:.1f}",
                    f"{one['held_out_loss']:.4f}" if one["same_updates"] else "", "yes" if one["same_updates"] else "no",
                )
            )  # fmt: skip
    head = ("lengths", "method", "real tokens/s over fixed", "samples/s over fixed (quartiles)", "padding")
    return [row(*head, "batches an update", "held-out loss", "same updates"), rule(8), *rows]


def rivals_updates() -> str:
    return str(read("train_rivals")["figures"]["CV 0.8"]["updates"])


def rivals_sentence() -> str:
    """Where ours is fastest among those that keep the updates, and where not."""
    said = []
    for case, found in read("train_rivals")["figures"].items():
        same = {name: one["samples_per_s"]["median"] for name, one in found["methods"].items() if one["same_updates"]}
        rivals = {name: speed for name, speed in same.items() if not name.startswith("dynagroup")}
        best = max(rivals, key=lambda name: rivals[name])
        said.append(f"{case}: {same['dynagroup'] / rivals[best]:.2f} times the best of them ({best})")
    return "; ".join(said)


def ranks_training_rows() -> list[str]:
    figures = read("loader_train")["figures"]
    named = {"fixed batches": "fixed", "`samples_per_update=128`": "update", "free-running": "free"}
    rows = []
    for name, key in named.items():
        found = figures[key]
        low, high = min(found["speed_over_fixed"]), max(found["speed_over_fixed"])
        speeds = ", ".join(f"{value:.0f}" for value in sorted(found["samples_per_s"]))
        rows.append(row(name, speeds, f"{low:.2f}x to {high:.2f}x", f"{found['held_out_loss']:.3f}", str(found["updates"]),
                         str(found["steps"])))  # fmt: skip
    return [row("", "samples/s", "against fixed", "held-out loss", "updates", "steps"), rule(6), *rows]


def trainer_rows() -> list[str]:
    figures = read("trainer")["figures"]
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
        rows.append(row(name, f"{found['ratio']['median']:.3f} ({low:.3f} to {high:.3f})", f"{sure[0]:.3f} to {sure[1]:.3f}",
                         f"{difference:.1f} ms"))  # fmt: skip
    head = ("", "median ratio (quartiles)", "95 % interval of the median", "difference an update")
    return [row(*head), rule(4), *rows]


def quality_rows() -> list[str]:
    found = read("quality")["figures"]
    losses = found["held_out_loss"]
    rows = [
        row(str(seed), f"{fixed:.3f}", f"{free:.3f}")
        for seed, (fixed, free) in enumerate(zip(losses["fixed"], losses["free"], strict=True))
    ]
    return [row("seed", f"fixed updates of {found['samples_per_fixed_update']}", "free-running"), rule(3), *rows]


def quality_sentence() -> str:
    found = read("quality")["figures"]
    spread = found["spread_of_seeds"]
    where = "behind" if found["mean_difference"] > 0 else "ahead"
    return (
        f"They end {abs(found['mean_difference']):.3f} {where} on average; seeds differ by {spread['fixed']:.3f} among fixed and "
        f"{spread['free']:.3f} among free runs."
    )


def objective_rows() -> list[str]:
    """One row a training: samples a second of the fewest batches and of least time."""
    rows = [
        row(name, *(f"{run['samples_per_s']:.0f} ({run['padding']:.0%}, {run['steps']})" for run in runs.values()))
        for name, runs in read("objective")["figures"].items()
    ]
    head = ("samples/s (padding, steps)", "fewest batches", "least time", "least time, a step costs 128")
    return [row(*head), rule(4), *rows]
