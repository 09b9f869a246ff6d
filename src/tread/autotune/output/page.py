"""The report of a tuning, `report.html`: the choice, the front, heat maps, step times, verifying runs.

It is built from the stored measurements alone, with the figures, tables and template of `tread report`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tread.autotune.cost import routes_of
from tread.autotune.output.text import named
from tread.autotune.sensitivity import HeatMap, gaps_by_level, heat_maps
from tread.files import write_text
from tread.page.document import Section, document
from tread.page.figure import Curves, Line
from tread.page.html import Html, joined, tag
from tread.page.sections import moment
from tread.page.svg import WIDTH, draw, layers

FILE = "report.html"
CELL = 34
LEFT, TOP = 44, 22
"""Dimensions of a heat map, in SVG user units."""


def write_page(folder: Path, facts: Mapping[str, Any]) -> Path:
    """Write the report of measurements with their conclusion."""
    path, result = folder / FILE, facts["result"]
    content = document(
        sections(facts),
        kicker="tread autotune",
        title=folder.name,
        heading=folder.name,
        notes=[note[:1].upper() + note[1:] for note in result["notes"]],  # some are also the end of a sentence
        command=facts["starts"][-1].get("command", ""),
    )
    write_text(path, content, errors="backslashreplace")
    return path


def sections(facts: Mapping[str, Any]) -> list[Section]:
    """Everything below the title."""
    result = facts["result"]
    found: dict[str, Html | None] = {
        "Choice": _choice(result),
        "Speed against loss gap": _front(result),
        "Sensitivity": _sensitivity(facts),
        "Step times": _times(result),
        "Verifying runs": _verified(result),
        "Commands and versions": _starts(facts),
    }
    return [(name, content) for name, content in found.items() if content]


def table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> Html:
    """A table with a heading; the first cell of a row names it."""
    top = tag("tr", *(tag("th", name, scope="col") for name in head))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    return tag("div", tag("table", top, *body), class_="wide")


def _choice(result: Mapping[str, Any]) -> Html:
    parts: list[object] = [tag("p", f"Asked for: {result['goal']}. {result['summary']}.")]
    if "chosen" in result:
        depth = result["rules"]["depth"]
        shares = [1.0] * depth
        for route in routes_of(result["chosen"]):
            for layer in route.layers:
                shares[layer] = 1 - route.selection_ratio
        words = "The share of tokens that each layer sees."
        parts.append(tag("figure", layers(shares), tag("figcaption", words), class_="stack"))
        parts.append(tag("pre", tag("code", json.dumps({"tread_config": result["tread_config"]}, indent=1))))
        parts.append(tag("p", "Train with"))
        parts.append(tag("pre", tag("code", result["command"])))
    else:
        parts.append(tag("p", "No routes were chosen, for the reason above."))
    if result["finalists"]:
        parts.append(table(FINALIST_COLUMNS, _finalists(result)))
    parts.append(tag("p", "Rules that every plan keeps to:"))
    parts.append(tag("ul", *(tag("li", rule) for rule in result["rules"]["sentences"])))
    return joined(parts)


FINALIST_COLUMNS = (
    "finalist", "speed-up, predicted", "speed-up, timed", "loss gap, predicted", "loss gap, as a whole", ""
)  # fmt: skip


def _finalists(result: Mapping[str, Any]) -> list[list[object]]:
    return [_finalist(number, one, result.get("chosen")) for number, one in enumerate(result["finalists"], start=1)]


def _finalist(number: int, one: Mapping[str, Any], chosen: str | None) -> list[object]:
    timed, whole = one["timed_speedup"], one["whole_gap"]
    return [
        f"{number}: {named(one['plan'])}",
        f"{one['speedup']:.3f}",
        "not timed" if timed is None else f"{timed:.3f}",
        f"{one['gap']:.2%}",
        "not measured" if whole is None else f"{whole:.2%}",
        tag("mark", "chosen") if one["plan"] == chosen else "rejected" if one.get("rejected") else "",
    ]


def _front(result: Mapping[str, Any]) -> Html | None:
    plans = sorted(result["front"], key=lambda one: one["speedup"])
    if not plans:
        return None
    lines = [Line(name="front", run=0, points=[(one["speedup"], 100 * one["gap"]) for one in plans], dotted=True)]
    marked = [one for one in plans if one["plan"] == result.get("chosen")]
    lines += [Line(name="chosen", run=1, points=[(one["speedup"], 100 * one["gap"])]) for one in marked]
    figure = Curves(
        key="front",
        title="plans that no measured plan beats",
        x="speed-up of a step, predicted",
        lines=lines,
        note="Loss gap in percent, predicted; the exact search went over all measured windows.",
    )
    rows = [[named(one["plan"]), f"{one['speedup']:.3f}", f"{one['gap']:.2%}"] for one in plans]
    listed = tag("details", tag("summary", "All of them"), table(("plan", "speed-up", "loss gap"), rows))
    return joined([tag("div", draw(figure), class_="charts"), listed])


def _sensitivity(facts: Mapping[str, Any]) -> Html:
    losses = {name: facts["losses"][name] for name in facts["result"]["windows"]}
    maps = heat_maps(losses)
    most = max((gap for one in maps for gap in one.gaps.values()), default=0.0)
    drawn = [
        tag(
            "figure",
            tag("figcaption", tag("h3", f"{one.ratio:g} of the tokens dropped")),
            heat(one, most),
            class_="stack",
        )
        for one in maps
    ]
    lead = tag(
        "p",
        "Loss gap of one window, in percent, by its first layer (rows) and last layer (columns); windows without a "
        "figure break a rule, or were not measured.",
    )
    finalists = enumerate((one["plan"] for one in facts["result"]["finalists"]), start=1)
    by_level = [
        Line(
            name=f"finalist {number}",
            run=number - 1,
            points=[(float(level), 100 * gap) for level, gap in enumerate(gaps_by_level(facts["losses"][name]), 1)],
            dotted=True,
        )
        for number, name in finalists
        if name in facts["losses"]
    ]
    note = "In percent, by quarters of the training times from the least noise to the most; each finalist as a whole."
    figure = Curves(key="levels", title="loss gap by noise level", x="quarter", lines=by_level, note=note)
    levels = tag("div", draw(figure), class_="charts") if by_level else ""
    return joined([lead, tag("div", *drawn, class_="beside"), levels])


def heat(one: HeatMap, most: float) -> Html:
    """A heat map as SVG, with the gap of each window in its cell; colours reach from 0 to `most`."""
    parts: list[object] = []
    for column, end in enumerate(one.ends):
        parts.append(tag("text", end, x=LEFT + column * CELL + CELL / 2, y=TOP - 7, text_anchor="middle"))
    for row, start in enumerate(one.starts):
        y = TOP + row * CELL
        parts.append(tag("text", start, x=LEFT - 8, y=y + CELL / 2 + 4, text_anchor="end"))
        for column, end in enumerate(one.ends):
            gap = one.gaps.get((start, end))
            if gap is None:
                continue
            x, strength = LEFT + column * CELL, max(0.0, gap) / most if most > 0 else 0.0
            parts.append(
                tag(
                    "g",
                    tag("title", f"{one.ratio:g} over {start}..{end}: {gap:.3%}"),
                    tag(
                        "rect",
                        x=x + 1,
                        y=y + 1,
                        width=CELL - 2,
                        height=CELL - 2,
                        rx=2,
                        style=f"fill:var(--s1);opacity:{0.08 + 0.72 * strength:.3f}",
                    ),
                    tag("text", _short(gap), x=x + CELL / 2, y=y + CELL / 2 + 4, text_anchor="middle",
                        style="fill:var(--ink);font-size:10px"),
                )
            )  # fmt: skip
    width, height = max(WIDTH, LEFT + len(one.ends) * CELL + 4), TOP + len(one.starts) * CELL + 4
    words = f"loss gap of windows that drop {one.ratio:g}, by first and last layer"
    return tag("svg", *parts, viewBox=f"0 0 {width} {height}", role="img", aria_label=words)


def _short(gap: float) -> str:
    """A gap in percent, in at most four characters.

    >>> _short(0.0123), _short(-0.0001), _short(0.234)
    ('1.2', '0.0', '23')
    """
    percent = round(100 * gap, 1) + 0.0
    return f"{percent:.1f}" if abs(percent) < 10 else f"{percent:.0f}"


def _times(result: Mapping[str, Any]) -> Html:
    rows = []
    for name, one in result["timed"].items():
        rounds = one["rounds"]
        measured = one["seconds"]
        rows.append(
            [
                named(name),
                f"{1000 * measured:.4g}",
                ", ".join(f"{1000 * seconds:.4g}" for seconds in rounds),
                f"{1000 * one['predicted']:.4g}",
                f"{one['predicted'] / measured - 1:+.1%}",
            ]
        )
    cost = result["cost"]
    layered = [
        [name, f"{1000 * one['linear']:.4g}", f"{1000 * one['square']:.4g}"]
        for name, one in cost["layers"].items()
        if one["linear"] or one["square"]  # stacks that were never routed have no coefficients
    ]
    words = (
        f"A step takes {1000 * cost['fixed']:.4g} ms whatever the plan, {1000 * cost['window']:.4g} ms for each window "
        "and in each layer the milliseconds below, at all tokens: one part goes with the tokens, one with their square."
    )
    return joined(
        [
            table(("plan", "ms, least of whole rounds", "each round", "fitted", "difference"), rows),
            tag("p", words),
            table(("layers", "with tokens", "with their square"), layered),
            *_pairs(result),
        ]
    )


def _pairs(result: Mapping[str, Any]) -> list[Html]:
    """Finalists timed beside dense."""
    rows = [
        [
            named(one["plan"]),
            *(", ".join(f"{1000 * pair[side]:.4g}" for pair in one["pairs"]) for side in ("dense", "routed")),
            f"{one['timed_speedup']:.3f}",
        ]
        for one in result["finalists"]
        if one["pairs"]
    ]
    if not rows:
        return []
    words = "Finalists and dense, timed in turns; the speed-up is the median over these pairs."
    return [tag("p", words), table(("finalist", "dense, ms", "routed, ms", "speed-up"), rows)]


VERIFIED_COLUMNS = "run", "steps", "minutes, expected", "minutes, taken", "validation loss", "against dense"


def _verified(result: Mapping[str, Any]) -> Html | None:
    rows = [
        [named(name), f"{one['steps']:,}", f"{one['expected_seconds'] / 60:.2f}",
         *(("diverged",) * 3 if one["val_loss"] is None else
           (f"{one['seconds'] / 60:.2f}", f"{one['val_loss']:.5f}", f"{one['against_dense']:+.2%}"))]
        for name, one in result["verified"].items()
    ]  # fmt: skip
    return table(VERIFIED_COLUMNS, rows) if rows else None


def _starts(facts: Mapping[str, Any]) -> Html:
    parts: list[object] = []
    for start in facts["starts"]:
        parts.append(tag("p", f"{moment(start)}, {start.get('device', '')}", class_="start"))
        parts.append(tag("pre", tag("code", start.get("command", ""))))
    versions = facts["starts"][-1].get("versions") or {}
    parts.append(table(("package", "version"), [[name, value] for name, value in versions.items() if value]))
    return joined(parts)
