"""The page of ``doctor --html``: one HTML file without scripts, readable by day and by night."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from string import Template

import numpy as np

from dynagroup.plan.compare import Comparison, Way
from dynagroup.plan.plan import fixed_batches
from dynagroup.plan.plots import Panel, shown_batches
from dynagroup.shapes import primary

SAMPLES_DRAWN = 150  # each is then wide enough to be seen
WIDTH = 460  # of a picture, in its own units
HEIGHT = 170
GAP = 1.5  # between two batches


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to change.

    Args:
        text: the advice in one line.
        way: the recommended way of the comparison; None: nothing is to change.
        loader: the line of code for a training loop. trainer: the argument ``dynagroup`` of the Trainer.
    """

    text: str
    way: Way | None = None
    loader: str = ""
    trainer: str = ""


TERMS = {
    "batch": "The samples that one rank runs in one forward pass. In the padded layout, all are as "
    "wide as the longest.",
    "rank": "One process, usually with one GPU.",
    "update": "One optimizer step. Its samples may be several batches.",
    "budget": "The most tokens that a batch may have, padding counted.",
    "steps": "Forward passes of an epoch. In a step, every rank runs one batch.",
    "padding": "Share of the computed tokens that only fill a sample up to the longest of its batch.",
    "ranks wait": "Share of their time in which ranks wait for the slowest rank of a step.",
    "largest batch": "Tokens of the largest batch, with padding. It must fit in memory.",
    "predicted time": "Time of an epoch over that of your batches today, predicted from the lengths. "
    "A hundred updates of your own training prove it.",
}
WAYS = {  # what the name of a way starts with -> what it is
    "fixed": "Your batches today: so many random samples each.",
    "group_by_length": "As transformers does it: 50 batches of random samples are sorted together, so an update has "
    "samples of similar length.",
    "dynagroup, updates of": "Every update has as many random samples as today. Only their division into batches "
    "differs, and the gradient is the same.",
    "dynagroup, grouping": "The samples of 50 updates are dealt anew: every update has as many samples as today, "
    "and long, middle and short ones.",
    "dynagroup, shuffle": "Batches as large as the budget allows. Updates differ in their number of samples.",
    "dynagroup, sorted": "The same in a fixed order, for evaluation.",
    "dynagroup, packed": "The samples of an update lie end to end, without padding. The model's attention must keep "
    "them apart: <code>dynagroup check MODEL</code> tells.",
}
CODE = Template("""\
<h2>In your own training loop</h2>
<pre><code>from dynagroup import PlannedDataLoader, TokenBudget

loader = $loader
for step in loader:
    (model(**step.batch).loss * step.loss_scale).backward()
    if step.ends_update:
        optimizer.step()
        optimizer.zero_grad()</code></pre>
<h2>With the Trainer of transformers or TRL</h2>
<pre><code>from dynagroup import TokenBudget
from dynagroup.integrations.hf import DynagroupConfig, DynagroupTrainer

trainer = DynagroupTrainer(model, args, train_dataset=dataset, dynagroup=$trainer)</code></pre>
""")
PAGE = Template("""\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>dynagroup doctor: $data</title>
<style>
:root{color-scheme:light dark;--ground:#fff;--text:#1d2733;--soft:#5b6b7c;--line:#d8dfe6;--raised:#f3f6f9;--chosen:#e3eefa;
--real:#2f5d8a;--padding:#f7dcca;--hatch:#c98a5e}
@media(prefers-color-scheme:dark){:root{--ground:#14191f;--text:#dce3ea;--soft:#94a3b3;--line:#303a45;--raised:#1c232b;
--chosen:#1d3550;--real:#7fb2e5;--padding:#3d2c20;--hatch:#b0764b}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--text);background:var(--ground);max-width:62rem;margin:2rem auto;
padding:0 1rem}
h1{font-size:1.6rem;margin:0}h2{font-size:1rem;margin:1.5rem 0 .3rem}p{margin:.4rem 0}.soft,figcaption{color:var(--soft)}
.advice{border-left:5px solid var(--real);background:var(--raised);padding:.8rem 1.2rem;margin:1.2rem 0}
.advice h2:first-of-type{margin-top:.8rem}.lead{font-size:1.15rem;font-weight:600}
pre{overflow-x:auto;background:var(--ground);border:1px solid var(--line);padding:.7rem;margin:0;font-size:.85rem}
.table{overflow-x:auto}table{border-collapse:collapse;width:100%}th,td{padding:.35rem .7rem;text-align:right;
border-bottom:1px solid var(--line);white-space:nowrap;font-variant-numeric:tabular-nums}
th:first-child,td:first-child{text-align:left}tr.chosen{background:var(--chosen);font-weight:600}
.pictures{display:grid;grid-template-columns:repeat(auto-fit,minmax(20rem,1fr));gap:1.5rem;margin:1.5rem 0}
figure{margin:0}figure>svg{border-bottom:1px solid var(--soft)}
svg{width:100%;height:auto;display:block}.real{fill:var(--real)}.padding{fill:url(#hatch)}
.key{display:inline-block;width:1.6em;height:.9em;vertical-align:-.05em}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.3rem 1.2rem}dt{font-weight:600}dd{margin:0}
@media(max-width:40rem){dl{display:block}dd{margin-bottom:.5rem}}
</style></head>
<body>
<h1>dynagroup doctor</h1>
<p class="soft">$about</p>
<section class="advice"><p class="lead">$lead</p>
$code</section>
<ul>
$findings
</ul>
<h2>Ways to form batches</h2>
<div class="table"><table>
$table
</table></div>
<p class="soft">Recommended are only ways whose updates have as many samples as today, short and long ones.
Other ways can take less time, but change what an update learns from. $device</p>
<section class="pictures">
$pictures
</section>
<h2>Terms</h2>
<dl>
$terms
</dl>
</body></html>
""")
FIGURE = Template("""\
<figure><figcaption><strong>$title</strong><br>$num_samples of the samples, in $num_batches batches; the height is
$most_tokens tokens<br><svg class="key" viewBox="0 0 16 9"><rect class="real" width="16" height="9"/></svg> tokens
<svg class="key" viewBox="0 0 16 9"><rect class="padding" width="16" height="9"/></svg> padding</figcaption>
<svg role="img" aria-label="$title" viewBox="0 0 $width $height"><defs><pattern id="hatch" width="5" height="5"
patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="5" height="5" style="fill:var(--padding)"/>
<rect width="1.4" height="5" style="fill:var(--hatch)"/></pattern></defs>$shapes</svg></figure>
""")


def page(
    comparison: Comparison, advice: Advice, *, data: str, findings: list[str], device: str
) -> str:
    """Returns the page: the advice and its code, the table with that row marked, two pictures, and all terms.

    Args:
        findings: sentences on today's batches. device: a sentence on the device for which time is predicted.
    """
    drawn = comparison.ways[2] if advice.way is None else advice.way
    items = [f"<li>{escape(_sentence(finding))}</li>" for finding in findings]
    return PAGE.substitute(
        data=escape(data),
        about=escape(_about(comparison, data)),
        lead=escape(_lead(comparison, advice)),
        code=_code(advice),
        findings="\n".join(items),
        table=_table(comparison, advice.way),
        device=escape(_sentence(device)),
        pictures=_pictures(comparison, drawn),
        terms=_terms(comparison),
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _about(comparison: Comparison, data: str) -> str:
    stream = primary(comparison.lengths)
    tokens = comparison.lengths[stream]
    median = int(np.median(tokens))
    lengths = f"{len(tokens):,} samples (median {median:,} {stream}, longest {tokens.max():,})"
    ranks = f"{comparison.world_size} ranks"
    if comparison.world_size == 1:
        ranks = "1 rank"
    return f"{data}: {lengths}; {ranks}; updates of {comparison.samples_per_update:,} samples"


def _lead(comparison: Comparison, advice: Advice) -> str:
    if advice.way is None:
        return _sentence(advice.text.removeprefix("nothing: "))
    today = comparison.ways[0]
    share = advice.way.plan.predicted_time / today.plan.predicted_time
    return (
        f"Change one line: an epoch is predicted to take {share:.0%} of today's time, "
        f"with {advice.way.padding:.0%} padding instead of {today.padding:.0%}."
    )


def _code(advice: Advice) -> str:
    if advice.way is None:
        return ""
    return CODE.substitute(loader=escape(advice.loader), trainer=escape(advice.trainer))


def _terms(comparison: Comparison) -> str:
    meanings = {}
    for way in comparison.ways:
        for start, meaning in WAYS.items():
            if way.name.startswith(start):
                meanings[way.name] = meaning
    meanings.update(TERMS)
    lines = [f"<dt>{escape(name)}</dt><dd>{meaning}</dd>" for name, meaning in meanings.items()]
    return "\n".join(lines)


def _table(comparison: Comparison, chosen: Way | None) -> str:
    head, *rows = comparison.table()
    lines = [_row(head, "th")]
    for way, row in zip(comparison.ways, rows, strict=True):
        if way is chosen:
            row[0] = f"{row[0]} (recommended)"
            lines.append(_row(row, "td", "chosen"))
        else:
            lines.append(_row(row, "td"))
    return "\n".join(lines)


def _row(cells: list[str], tag: str, kind: str = "") -> str:
    content = [f"<{tag}>{escape(cell)}</{tag}>" for cell in cells]
    return f'<tr class="{kind}">{"".join(content)}</tr>'


def _pictures(comparison: Comparison, way: Way) -> str:
    """Draws the same samples twice: in fixed batches, and in batches of ``way``, evenly spaced in the epoch."""
    batches = way.plan.batches
    numbers = shown_batches(batches.sizes.tolist(), SAMPLES_DRAWN)
    shown = batches.take(np.array(numbers, np.int64))
    order = np.random.default_rng(0).permutation(shown.order)
    today = comparison.ways[0]
    fixed = today.plan.panel(today.name, fixed_batches(order, comparison.batch_size))
    ours = way.plan.panel(way.name, shown)
    most_tokens = max([1, *fixed.widths, *ours.widths])
    return _figure(fixed, most_tokens) + _figure(ours, most_tokens)


def _figure(panel: Panel, most_tokens: int) -> str:
    """Draws batches side by side: a sample is a column, its tokens filled, its padding hatched."""
    num_samples = sum(map(len, panel.batches))
    column = (WIDTH - GAP * len(panel.batches)) / max(num_samples, 1)
    scale = HEIGHT / most_tokens
    left = 0.0
    shapes = []
    for tokens, width in zip(panel.batches, panel.widths, strict=True):
        right = left + column * len(tokens)
        top = HEIGHT - scale * width
        if not panel.packed:
            path = f"M{left:.1f} {HEIGHT}V{top:.1f}H{right:.1f}V{HEIGHT}z"
            shapes.append(f'<path class="padding" d="{path}"/>')
        steps = []
        for length in np.sort(tokens)[::-1].tolist():
            steps.append(f"V{HEIGHT - scale * length:.1f}h{column:.2f}")
        path = f"M{left:.1f} {HEIGHT}{''.join(steps)}V{HEIGHT}z"
        shapes.append(f'<path class="real" d="{path}"/>')
        left = right + GAP
    return FIGURE.substitute(
        title=escape(panel.title),
        num_samples=num_samples,
        num_batches=len(panel.batches),
        most_tokens=f"{most_tokens:,}",
        width=WIDTH,
        height=HEIGHT,
        shapes="".join(shapes),
    )
