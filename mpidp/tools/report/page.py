"""Runs enter, one page leaves: HTML that needs no other file, no script and no network, and can be printed."""

import time
from collections.abc import Sequence
from html import escape
from string import Template

import mpidp
from mpidp.tools.report import tables
from mpidp.tools.report.curves import Panel, events, gaps, panels
from mpidp.tools.report.facts import Table, differences, facts, starts
from mpidp.tools.report.figures import draw_panel, draw_phases, style, to_svg
from mpidp.tools.report.phases import Phases, phases_of
from mpidp.tools.report.run import Run

# How a report is known, so that no other file is overwritten.
MARK = '<meta name="generator" content="mpidp report'

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
$mark $version">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>$title</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; margin: 0; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid #ccc; }
.from { color: #555; margin: .2rem 0 1rem; }
.notes { border-left: 4px solid #D55E00; padding-left: .8rem; margin: 1rem 0; list-style: none; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1.2rem; }
figure { margin: 0; break-inside: avoid; }
figure svg { width: 100%; height: auto; display: block; }
figcaption { font-weight: 600; }
figcaption span { font-weight: 400; color: #555; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .4rem 0 1.2rem; font-variant-numeric: tabular-nums; font-size: .9rem; }
caption { text-align: left; font-weight: 600; padding: .2rem 0; }
th, td { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #e4e4e4; }
th { font-weight: 600; }
tbody th { font-weight: 400; color: #444; }
td { overflow-wrap: break-word; }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: .85rem; }
summary { cursor: pointer; font-weight: 600; }
@media print {
  body { font-size: 10pt; max-width: none; margin: 0; }
  .figures { grid-template-columns: 1fr 1fr; }
  table { font-size: 8pt; }
  th, td { padding-right: .5rem; }
  .scroll { overflow: visible; }
  h2 { break-after: avoid; }
}
</style>
</head>
<body>
<h1>$title</h1>
<p class="from">Written by mpidp $version on $time.</p>
$body
</body>
</html>
""")


def page(runs: Sequence[Run]) -> str:
    """The report of one run, or of several beside each other.

    Args:
        runs: at least one, each with a label of its own.
    """
    names = [run.label for run in runs]
    title = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return _PAGE.substitute(
        mark=MARK,
        version=escape(mpidp.__version__),
        title=escape(title),
        time=time.strftime("%Y-%m-%d %H:%M %Z"),
        body="\n".join(_sections(runs)),
    )


def _sections(runs: Sequence[Run]) -> list[str]:
    several = len(runs) > 1
    notes = [note for run in runs for note in gaps(run)]
    body = ['<ul class="notes">', *(f"<li>{escape(note)}</li>" for note in notes), "</ul>"] if notes else []
    body += ["<h2>Run</h2>", _table(facts(runs)), _of_runs(starts(runs), several)]
    if several:
        differing = differences(runs)
        body.append(_table(differing) if differing.rows else "<p>The settings of these runs are the same.</p>")
    drawn = panels(runs)
    happened = [events(run) for run in runs]
    body += ["<h2>Curves</h2>", _curves(runs, drawn)]
    if any(happened):
        body.append(_of_runs(tables.events(list(zip(runs, happened, strict=True))), several))
    body.append(_of_runs(tables.numbers(drawn, runs), several))
    timed = [(run, found) for run in runs if (found := phases_of(run)) is not None]
    if timed:
        body += ["<h2>Time</h2>", *(_phases(number, run, found, several) for number, (run, found) in enumerate(timed))]
        body.append(_of_runs(tables.phases(timed), several))
        body.append("<p>Evaluation, checkpoints and bookkeeping are in none of the phases.</p>")
    body += [_table(table) for run in runs if (table := tables.ranks(run)) is not None]
    saved = tables.checkpoints(runs)
    body += ["<h2>Checkpoints</h2>", _of_runs(saved, several) if saved.rows else "<p>None.</p>"]
    body.append("<h2>Effective configuration</h2>")
    body += [_details(run) for run in runs]
    return body


def _curves(runs: Sequence[Run], drawn: Sequence[Panel]) -> str:
    labels, happened = [run.label for run in runs], [events(run) for run in runs]
    made = []
    for number, panel in enumerate(drawn):
        with style():
            figure = draw_panel(panel, labels, happened)
            svg = to_svg(figure, f"panel{number}", f"{panel.title} over optimizer steps", _said(panel, runs))
        made.append(f"<figure>\n<figcaption>{escape(panel.title)}</figcaption>\n{svg}\n</figure>")
    return '<div class="figures">\n' + "\n".join(made) + "\n</div>"


def _said(panel: Panel, runs: Sequence[Run]) -> str:
    """What the figure shows, in words."""
    rows = tables.numbers([panel], runs).rows
    return "; ".join(f"{run}, {name}: from {first} to {last}" for name, run, first, last, *_ in rows)


def _phases(number: int, run: Run, found: Phases, several: bool) -> str:
    title = "Time of a step of rank 0, by phase" + (f": {run.label}" if several else "")
    slower = "slower column is" if found.cut == 1 else "slower columns are"
    cut = f" <span>{found.cut:,} {slower} cut off at the top.</span>" if found.cut else ""
    said = "; ".join(f"{row[0]} {row[3]} %" for row in tables.phases([(run, found)]).rows[:-1])
    with style():
        svg = to_svg(draw_phases(found, events(run)), f"phases{number}", title, said)
    return f"<figure>\n<figcaption>{escape(title)}.{cut}</figcaption>\n{svg}\n</figure>"


def _of_runs(table: Table, several: bool) -> str:
    return _table(table if several else tables.without(table, "run"))


def _table(table: Table) -> str:
    header = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.header)
    lines = [f'<div class="scroll"><table><caption>{escape(table.caption)}</caption>', f"<thead><tr>{header}</tr>"]
    lines.append("</thead><tbody>")
    for name, *cells in table.rows:
        lines.append(f'<tr><th scope="row">{escape(name)}</th>' + "".join(f"<td>{escape(c)}</td>" for c in cells))
        lines[-1] += "</tr>"
    return "\n".join([*lines, "</tbody></table></div>"])


def _details(run: Run) -> str:
    config = escape(run.config_text)
    return f"<details><summary>{escape(run.label)}: config.toml</summary>\n<pre>{config}</pre></details>"
