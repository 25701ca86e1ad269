"""The page of a report and its figures: HTML that needs no other file, no script and no network. Needs matplotlib."""

import io
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from string import Template
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter

import mpidp
from mpidp.tools.report import tables
from mpidp.tools.report.curves import Curve, Event, Panel, Phases, events, gaps, panels, phases_of
from mpidp.tools.report.report import Run
from mpidp.tools.report.tables import Table, differences, facts, starts

# Told apart by most colour-blind readers: the palette of Okabe and Ito, without black and yellow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_PHASE_COLOURS = ("#E69F00", "#56B4E9", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#999999")
_MARKS: dict[str, tuple[Any, str]] = {"restart": ("--", "#555555"), "ranks lost": (":", "#B00000")}
# Values that span this factor are drawn on a logarithmic axis.
_LOG_SPAN = 20.0
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: it can be read aloud, searched and copied
    "svg.hashsalt": "mpidp",
    "text.parse_math": False,  # a run may be called "$a$"
    "font.size": 10.0,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.3,
    "legend.frameon": False,
}


@contextmanager
def style() -> Iterator[None]:
    """Draws in the report's style, whatever the user's own settings of matplotlib are."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def draw_panel(panel: Panel, labels: Sequence[str], events: Sequence[Sequence[Event]]) -> Figure:
    """The curves of all runs in one pair of axes, what happened to the runs as vertical lines.

    Args:
        panel: what to draw.
        labels: name of each run.
        events: of each run.
    """
    handles: dict[str, Line2D] = {}
    figure, axes = _figure()
    for curve in panel.curves:
        handles[_name(curve, panel, labels)] = _draw_curve(axes, curve, len(labels))
    for run, happened in enumerate(events):
        handles |= _mark(axes, happened, None if len(labels) == 1 else _colour(run, len(labels)))
    values = [value for curve in panel.curves for _, value in curve.series.finite]
    if panel.may_be_log and values and min(values) > 0 and max(values) > _LOG_SPAN * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylabel(f"{panel.label}, logarithmic")
    else:
        axes.set_ylabel(panel.label)
    if panel.from_zero and max(values, default=0) > 0:
        axes.set_ylim(0, 1.05 * max(values))
    if len(handles) > 1:
        _put_legend(figure, list(handles.values()), list(handles))
    return figure


def draw_phases(phases: Phases, events: Sequence[Event]) -> Figure:
    """Milliseconds of a step by phase, stacked, over the steps of one run."""
    figure, axes = _figure(width=9.6)
    handles, names = [], []
    floor = [0.0] * len(phases.means_ms)
    for number, name in enumerate(phases.names):
        top = [low + means[number] for low, means in zip(floor, phases.means_ms, strict=True)]
        colour = _PHASE_COLOURS[number % len(_PHASE_COLOURS)]
        handles.append(axes.stairs(top, phases.edges, baseline=floor, fill=True, color=colour, linewidth=0))
        names.append(name)
        floor = top
    for name, line in _mark(axes, events, None).items():
        handles.append(line)  # type: ignore[arg-type]
        names.append(name)
    axes.set_ylabel("time of a step (ms)")
    axes.set_ylim(0, phases.ceiling_ms)
    axes.set_xlim(phases.edges[0], phases.edges[-1])
    _put_legend(figure, handles, names)
    return figure


def to_svg(figure: Figure, name: str, title: str, description: str) -> str:
    """The figure as an `svg` element with a title and a description, its identifiers unlike those of other figures.

    Args:
        figure: what to write.
        name: of letters, digits and hyphens; unlike that of any other figure in the page.
        title: read aloud, and shown by the browser.
        description: what the figure says, for who cannot see it.
    """
    written = io.BytesIO()
    figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(written.getvalue())
    for element in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(element)
    for element in root.iter():
        for key, value in element.attrib.items():
            if key == "id":
                element.set(key, f"{name}-{value}")
            elif key == f"{{{_XLINK}}}href" and value.startswith("#"):
                element.set(key, f"#{name}-{value[1:]}")
            elif "url(#" in value:
                element.set(key, value.replace("url(#", f"url(#{name}-"))
    for place, (tag, text) in enumerate((("title", title), ("desc", description))):
        element = ElementTree.Element(f"{{{_SVG}}}{tag}", {"id": f"{name}-{tag}"})
        element.text = text
        root.insert(place, element)
    root.attrib.update({"role": "img", "aria-labelledby": f"{name}-title {name}-desc"})
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    return ElementTree.tostring(root, encoding="unicode")


def _figure(width: float = 6.4, height: float = 3.4) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel("optimizer steps")
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    return figure, axes


def _name(curve: Curve, panel: Panel, labels: Sequence[str]) -> str:
    """What the legend calls a curve: only what tells it from the others."""
    if len(labels) == 1:
        return curve.what
    several = len({other.number for other in panel.curves}) > 1
    return f"{labels[curve.run]}, {curve.what}" if several else labels[curve.run]


def _draw_curve(axes: Axes, curve: Curve, num_runs: int) -> Line2D:
    series = curve.series
    colour = _colour(curve.number, 1) if num_runs == 1 else _colour(curve.run, num_runs)
    marked = list(range(len(series.steps))) if curve.is_evaluation else _alone(series.values)
    (line,) = axes.plot(
        series.steps,
        series.values,
        color=colour,
        linestyle="-" if num_runs == 1 or curve.number == 0 else "--",
        marker="o" if marked else None,
        markersize=3.5 if curve.is_evaluation else 3.0,
        markevery=marked or None,
        gid=f"curve-{curve.run}-{curve.number}",
    )
    return line


def _alone(values: Sequence[float]) -> list[int]:
    """Indices of points between two gaps: no line leads to them, so they would not be seen."""
    padded = [math.nan, *values, math.nan]
    return [
        index
        for index, (before, value, after) in enumerate(zip(padded, values, padded[2:], strict=False))
        if math.isfinite(value) and not math.isfinite(before) and not math.isfinite(after)
    ]


def _colour(number: int, count: int) -> Any:
    return COLOURS[number] if count <= len(COLOURS) else matplotlib.colormaps["viridis"](0.9 * number / (count - 1))


def _mark(axes: Axes, events: Sequence[Event], colour: Any) -> dict[str, Line2D]:
    """Vertical lines; those of one kind have one entry in the legend, in the colour of one run only if it is alone."""
    handles = {}
    for event in events:
        dashes, usual = _MARKS[event.kind]
        axes.axvline(event.step, linestyle=dashes, color=colour or usual, linewidth=1.1)
        handles[event.kind] = Line2D([], [], linestyle=dashes, color=usual, linewidth=1.1)
    return handles


def _put_legend(figure: Figure, handles: Sequence[Any], names: list[str]) -> None:
    """Above the axes, where it covers no line; the figure grows with it."""
    columns = max(1, int(figure.get_figwidth() * 11 / (max(map(len, names)) + 7)))
    rows = math.ceil(len(names) / columns)
    figure.set_figheight(figure.get_figheight() + 0.22 * (rows - 1))
    figure.legend(handles, names, loc="outside upper left", ncols=min(columns, len(names)))


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
