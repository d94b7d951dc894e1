"""Writes REPORT.md from the figures of ``benchmarks/results/regressor.json``: ``python -m regressor.report``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results" / "regressor.json"
PUBLISHED = RESULTS.with_name("published.json")
FITS = RESULTS.with_name("fits.json")
TOKEN_BUDGETS = RESULTS.with_name("token_budgets.json")
REPORT = HERE / "REPORT.md"

# Targets: RMSE of the ratio near the decision, unsafe rate in percent, and growth.
RMSE = 0.05
UNSAFE = 0.1
GROWTH = 0.93
# With the workload unknown.
UNKNOWN_UNSAFE = 0.5
UNKNOWN_GROWTH = 0.75

SIZES_KNOWN = "regressor, sizes known"
FORM = "closed form, sizes known"

Figures = dict[str, Any]

HEAD = """# The pretrained regressor: figures

Trained on {workloads} simulated workloads of {families} families (see `data/README.md`).
{measured}
`benchmarks/results/regressor.json` holds all figures, by mode and by family too; this page is written from it by
`python -m regressor.report`. {hardware}, {date}.

**Leave one architecture out**: every family is judged by a regressor that saw neither it nor eight others (four folds), with
the constants of the closed form fitted again in each fold. A first batch nearly fills a device: 40 to 95 % of what static
memory leaves of 16 GB or more. A later one is mostly shorter. *Near the decision* is a true ratio of 0.7 to 1.3. *Unsafe* is
accepted at headroom 0.9 with a true ratio above 1.0, in percent of what was accepted, and of the batches that a plan would
choose. *Growth* is the chosen batch size over the largest that truly stays within the headroom; never growing at all is a
growth of {never}.
"""

TIERS = """
## What is known decides

- **traced**: `Workload.from_model(model)` runs a few layers on tensors without data and knows the memory of any batch as
  polynomials. The trees have nothing to add, and are not asked.
- **sizes**: a workload written down by hand, or of a model that cannot be traced: the closed form of its sizes, lifted
  by trees where forms like it fell short.
- **kind**, **mode**, **nothing**: quantile {quantile} over traced models that agree with what is known.
"""

COUNTED = """## Families whose lengths count all that is read ({rows:.0f} rows)

Without Whisper, whose audio has no length, and without the images of the vision model.
"""

DIRECT = """## Against simulations of the whole model ({shapes} shapes)

For the rows above a traced workload would be exact by definition. Here the truth is another one: all layers run, at lengths
that were not traced. Of the bytes themselves the traced form is off by {lowest:+.2f} to {highest:+.2f} % (median {median:.3f} %).
"""

NOTES = """## Where the errors come from

- A trace is of a few layers at a few shapes. Where a mask must be padded to 16 positions for its kernel, every length is
  taken to need that; sizes are half an allocation block more than their bytes.
- Known by its sizes, a model is what its config says, not what its code does: whether attention normalises in float32,
  returns its scores, or shares a bias between layers has no field.
- With nothing known, generation with a thousand new tokens is as likely as training: both cannot be served.
  `Workload(mode="train")` is enough to grow batches; so is `Workload.from_model`.
- Lengths that do not count everything that is read (audio, images outside the text) make every unknown workload's bound
  wrong: say `fixed_tokens`, or trace the model with `inputs=`.
"""


def table(rows: list[list[str]]) -> str:
    """Markdown."""
    head, *body = rows
    rule = ["---"] * len(head)
    lines = [f"| {' | '.join(row)} |\n" for row in (head, rule, *body)]
    return "".join(lines)


def rival_table(figures: Figures, names: dict[str, str]) -> str:
    """One line a rival."""
    head = ["", "RMSE", "bias", "median error", "unsafe % of accepted"]
    has_choices = "growth" in next(iter(figures.values()))
    if has_choices:
        head += ["unsafe % of chosen", "growth"]
    rows = [head]
    for name, shown in names.items():
        if name not in figures:
            continue
        rival = figures[name]
        row = [shown, f"{rival['rmse']:.3f}", f"{rival['bias']:+.3f}"]
        row += [f"{rival['median_error']:.3f}", f"{rival['unsafe_percent']:.2f}"]
        if has_choices:
            row += [f"{rival['unsafe_choices_percent']:.2f}", f"{rival['growth']:.3f}"]
        rows.append(row)
    return table(rows)


NAMES = {
    "regressor, workload traced": "regressor, traced",
    "regressor, sizes known": "regressor, sizes known",
    "closed form, sizes known": "closed form alone, sizes known",
    "closed form, safety 1.05": "closed form x 1.05",
    "closed form, safety 1.1": "closed form x 1.1",
    "regressor, kind known": "regressor, kind known",
    "regressor, mode known": "regressor, mode known",
    "regressor, nothing known": "regressor, nothing known",
    "quantile 0.9, mode known": "mode known, quantile 0.9",
    "quantile 0.99, mode known": "mode known, quantile 0.99",
    "quantile 0.9, nothing known": "nothing known, quantile 0.9",
    "quantile 0.99, nothing known": "nothing known, quantile 0.99",
    "padded tokens": "padded tokens",
    "dynabatch 0.2.23": "dynabatch 0.2.23",
}


def targets(result: Figures) -> str:
    """What was aimed at, and what was reached."""
    overall = result["overall"]
    counted = result["counted"]
    nothing = "regressor, nothing known"
    mode = "regressor, mode known"
    traced = result["simulated_directly"]["regressor, workload traced"]
    rows = [["", "target", "", "figure"]]
    rows.append(_rmse_target("traced", traced))
    rows.append(_unsafe_target("traced", traced, UNSAFE))
    for case, name in {"sizes known": SIZES_KNOWN, "sizes known, closed form alone": FORM}.items():
        rows.append(_rmse_target(case, overall[name]))
        rows.append(_unsafe_target(case, overall[name], UNSAFE))
        rows.append(_growth_target(case, overall[name], GROWTH))
    unknown = {
        "nothing known": overall[nothing],
        "nothing known, all counted": counted[nothing],
        "mode known": overall[mode],
        "mode known, all counted": counted[mode],
    }
    for case, figures in unknown.items():
        rows.append(_unsafe_target(case, figures, UNKNOWN_UNSAFE))
        rows.append(_growth_target(case, figures, UNKNOWN_GROWTH))
    return table(rows)


def _rmse_target(case: str, figures: Figures) -> list[str]:
    rmse = figures["rmse"]
    return [case, f"RMSE at most {RMSE}", _reached(rmse <= RMSE), f"{rmse:.4f}"]


def _unsafe_target(case: str, figures: Figures, target: float) -> list[str]:
    unsafe = figures["unsafe_percent"]
    shown = f"{unsafe:.2f} of accepted"
    if "growth" in figures:
        shown += f", {figures['unsafe_choices_percent']:.2f} of chosen"
    return [case, f"unsafe % at most {target}", _reached(unsafe <= target), shown]


def _growth_target(case: str, figures: Figures, target: float) -> list[str]:
    growth = figures["growth"]
    return [case, f"growth at least {target}", _reached(growth >= target), f"{growth:.3f}"]


def _reached(yes: bool) -> str:
    return "reached" if yes else "missed"


REAL = """## Against real GPUs

Peaks that others published (`data/published.json` names sources and what they leave open), and what is simulated for them.
None was used to fit anything; how each was run was read from its source. One thing was looked up after a first comparison:
phi-1.5 is run with LitGPT's fused GELU; with that of `transformers`, which keeps more, it is simulated 27 to 49 % higher.
torchtitan prints what the allocator had *reserved*, and its run has torch.compile and Float8, which are not simulated; its loop
lets the logits go before the backward pass (`keeps_outputs=False`): kept, it would be simulated at 81.9 (-2.3 %). An earlier
simulation said 91.2: it took sharding's mixed precision for autocast, which keeps hidden states in float32.

{published}
Generation of NLLB-200-600M, {rows} batches of {runs} runs measured by the authors of dynabatch (see `data/README.md`). How long
the outputs became is not recorded, so memory scatters downward from what 200 new tokens take. The largest of
at least four batches of a shape, over 500 MiB ({shapes} shapes), lies {low} to {high} from the simulation.

Do trees on top help? Runs held out in ten folds; *exceeded*: batches that took more than was said; *accepted*: said to take at
most 0.9 of the run's first batch; *unsafe*: of these, those that took more than it. Trees tighten what is said of small batches,
accept more, and are the only ones that accept unsafe batches.

{trees}
What a run's own rows are worth: its first four batches and {drawn} others, drawn at random, correct what is said of the rest
(mean over {own_runs} runs of at least 60 batches; models that answer in shares are given the first batch's bytes). Six runs take
about 2.1 times what is simulated, at every size: how they were run is not recorded. One line above the run's rows, never below
the trace, ends that without accepting an unsafe batch; so that is what `measured=` does. Trees that may lower the trace accept
unsafe batches, and forms fitted to the rows instead of the trace more of them; trees that may only raise it
say less than the line. One model on machines that are not named: nothing can be left out by machine or by model here.

{own}"""

CHECKED = """## What fits, against the whole model

`MemoryBudget.from_model` for 80 GB: the batch that it calls the largest, and one of 2 % more samples, simulated with every layer
(`python -m regressor.check_fits`). *Within 2 %*: the first takes at most 2 % more than the limit, the second does not fit.
Lengths {shortest} to {longest}; {models}.

{table}"""


TOKENS = """## Where a token budget fails

{gb:.0f} GB, headroom {headroom:.0%}, bfloat16, simulated. *Tuned*: the token budget that just fits samples of the usual length
(512 tokens; of two streams 512 and 128); its *hardest* batch is that of another length that takes most: over 100 % is out of
memory. *Safe*: the largest token budget that fits at every length that fits at all, and the share of the usual samples that it
still allows. Where memory is linear in padded tokens a token budget is all that is needed.

{table}"""


def by_family(result: Figures) -> str:
    """Where the closed form of the sizes is furthest off, and what the trees' lift does to it."""
    families = result["by_family"]
    heads = ["family"]
    for figure in ("RMSE", "unsafe % of accepted", "growth"):
        heads += [figure, "of the form"]
    rows = [heads]
    for name in sorted(families, key=lambda name: -families[name][FORM]["rmse"])[:10]:
        lifted = families[name][SIZES_KNOWN]
        form = families[name][FORM]
        row = [name]
        for key, digits in {"rmse": 3, "unsafe_percent": 2, "growth": 3}.items():
            for figures in (lifted, form):
                row.append(f"{figures[key]:.{digits}f}")
        rows.append(row)
    num_less_safe = 0
    for figures in families.values():
        lifted_unsafe = figures[SIZES_KNOWN]["unsafe_percent_of_all"]
        if lifted_unsafe > figures[FORM]["unsafe_percent_of_all"]:
            num_less_safe += 1
    return (
        f"{table(rows)}\nFamilies that the lift makes less safe than the closed form: "
        f"{num_less_safe} of {len(families)}. Its price is RMSE and growth.\n"
    )


def write(result: Figures) -> str:
    """The whole page."""
    error = result["traced_bytes_error"]
    num_measured = result["measured_workloads"]
    measured = "No GPU was at hand: nothing here is measured."
    left_out = (
        "Not measured: simulated against measured peaks (`python -m regressor.measure_gpu`).\n"
    )
    if num_measured:
        measured = f"{num_measured} measured ones are among its rows."
        left_out = ""
    head = HEAD.format(
        workloads=result["workloads"],
        families=len(result["by_family"]),
        measured=measured,
        never=f"{result['never_growing']:.2f}",
        hardware=result["hardware"],
        date=result["date"],
    )
    direct = DIRECT.format(
        shapes=error["shapes"],
        lowest=100 * error["lowest"],
        highest=100 * error["highest"],
        median=100 * error["median"],
    )
    num_rows = result["overall"]["padded tokens"]["rows"]
    num_counted = result["counted"]["padded tokens"]["rows"]
    parts = [head, "## Targets\n", targets(result), left_out]
    parts.append(TIERS.format(quantile=result["recipe"]["quantile"]))
    parts.append(f"## All families ({num_rows:.0f} rows)\n")
    parts.append(rival_table(result["overall"], NAMES))
    parts.append(COUNTED.format(rows=num_counted))
    parts.append(rival_table(result["counted"], NAMES))
    parts.append(direct)
    parts.append(rival_table(result["simulated_directly"], NAMES))
    parts.append("## By family, sizes known\n")
    parts.append(by_family(result))
    parts.append(real_gpus(_read(PUBLISHED)))
    parts.append(what_fits_checked(_read(FITS)))
    parts.append(token_budgets(_read(TOKEN_BUDGETS)))
    parts.append(NOTES)
    return "\n".join(parts)


def _read(path: Path) -> Figures:
    return json.loads(path.read_text(encoding="utf-8"))


def real_gpus(result: Figures) -> str:
    """Simulated against peaks that others measured or published."""
    published = [["source", "model", "samples", "longest", "published", "simulated", "error"]]
    for row in result["published"]:
        names = ("source", "model", "num_samples", "longest", "peak", "simulated")
        published.append([*(str(row[name]) for name in names), f"{row['error']:+.1%}"])
    measured = result["generation"]
    own_rows = measured["own_rows"]
    heads = ["exceeded", "said / taken, median", "accepted", "unsafe of accepted"]
    own = [["prediction of the rest", *heads]]
    for name, row in own_rows["how"].items():
        own.append([name, *_accepted(row, f"{row['slack']:.2f}")])
    trees = [["prediction", *heads]]
    for row in measured["corrected"]:
        trees.append([row["how"], *_accepted(row, str(row["slack"]))])
    spread = measured["envelope_quantiles"]
    return REAL.format(
        published=table(published),
        trees=table(trees),
        own=table(own),
        rows=f"{measured['rows']:,}",
        runs=measured["runs"],
        shapes=measured["envelope_shapes"],
        low=f"{spread['0.05'] - 1:+.1%}",
        high=f"{spread['1'] - 1:+.1%}",
        own_runs=own_rows["runs"],
        drawn=own_rows["known"] - 4,
    )


def _accepted(row: Figures, slack: str) -> list[str]:
    exceeded = f"{row['exceeded']:.1%}"
    accepted = f"{row['accepted']:.1%}"
    return [exceeded, slack, accepted, f"{row['unsafe_of_accepted']:.1%}"]


def what_fits_checked(result: Figures) -> str:
    """Of the answers to "what fits?", how many the whole model confirms."""
    by_setting: dict[str, list[Figures]] = {}
    for row in result["rows"]:
        by_setting.setdefault(row["setting"], []).append(row)
    rows = [["setting", "models", "answers", "within 2 %", "peak / limit of the largest batch"]]
    for setting, of_setting in by_setting.items():
        answers = [row for row in of_setting if "samples" in row]
        # Of fewer samples, one is more than 2 %.
        peaks = [row["taken"] for row in answers if row["samples"] >= 50]
        reach = f"{min(peaks):.4f} to {max(peaks):.4f}" if peaks else "-"
        num_models = len({row["model"] for row in answers})
        num_right = sum(row["ok"] for row in answers)
        rows.append([setting, str(num_models), str(len(answers)), str(num_right), reach])
    text = table(rows)
    untraced = [row for row in result["rows"] if not row.get("traced")]
    if untraced:
        names = ", ".join(f"{row['model']} ({row['setting']})" for row in untraced)
        text += f"\nNot traced, so estimated from its sizes, with a warning: {names}.\n"
    lengths = [row["length"] for row in result["rows"] if "length" in row]
    models = dict.fromkeys(row["model"] for row in result["rows"])
    return CHECKED.format(
        table=text,
        shortest=min(lengths),
        longest=max(lengths),
        models=", ".join(models),
    )


def token_budgets(result: Figures) -> str:
    """The hardest batch of a token budget tuned at one length, and what a safe one leaves unused."""
    rows = [["workload", "tuned", "hardest batch", "its memory", "safe", "usual samples it allows"]]
    for name, row in result["rows"].items():
        lengths = " + ".join(f"{length:,}" for length in row["hardest"].values())
        hardest = f"{row['hardest_samples']:,} x {lengths}"
        peak = f"{row['peak_share_of_hardest']:.0%}"
        num_usual = f"{row['safe_usual']:,} of {row['largest_usual']:,}"
        usual = f"{num_usual} ({row['share_used_by_safe']:.0%})"
        tuned = f"{row['tuned_tokens']:,}"
        rows.append([name, tuned, hardest, peak, f"{row['safe_tokens']:,}", usual])
    about = result["about"]
    return TOKENS.format(
        table=table(rows), gb=about["limit_bytes"] / 1e9, headroom=about["headroom"]
    )


def main() -> None:
    page = write(_read(RESULTS))
    REPORT.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
