"""The table of targets: the bounds of each row, and the measurement that is judged by them.

A row is judged by its fastest successful measurement, or the fastest that fits if the row bounds memory; what it does
beyond the product's own settings is noted beside its name. The speed-up against the ideal is judged on that same
measurement, so a slow dense step cannot help a row. Every measurement is listed below the table, because the fastest of
many flatters.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from benchmarks.common.record import Facts, describe


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table; a bound that is None is only reported."""

    key: str
    work: str
    peer: str = "-"
    milliseconds: float | None = None
    """Upper bound of a routed step."""
    images: float | None = None
    """Lower bound of images per second."""
    gib: float | None = None
    """Upper bound of peak memory."""
    achieved: float | None = None
    """Lower bound of the measured over the ideal speed-up."""
    unit: Literal["ms", "img/s"] = "ms"


ROWS = (
    Row(
        key="flux-checkpointed",
        work="FLUX.1-dev, LoRA r16, checkpointed",
        peer="706 ms",
        milliseconds=280,
        achieved=0.97,
    ),
    Row(key="flux", work="the same, not checkpointed", peer="339 ms", milliseconds=195, gib=32, achieved=0.97),
    Row(key="flux-8bit-checkpointed", work="FLUX.1-dev, 8-bit compute base, checkpointed", milliseconds=220),
    Row(key="flux-8bit", work="the same, not checkpointed", milliseconds=150),
    Row(key="dit-xl", work="DiT-XL/2, B=256, 256 tokens", peer="868 img/s", images=1150, achieved=0.95, unit="img/s"),
    Row(key="dit-xl-float8", work="the same with float8 linears", images=1400, unit="img/s"),
    Row(key="dit-b", work="DiT-B/2, B=256, 256 tokens", peer="2,971 img/s", images=4500, achieved=0.95, unit="img/s"),
    Row(key="dit-b-float8", work="the same with float8 linears", unit="img/s"),
    Row(key="sd3", work="SD3.5-large, LoRA r16, 1024 px", achieved=0.97),
    Row(key="wan-checkpointed", work="Wan 2.1 14B, LoRA r16, 32,760 tokens, checkpointed", achieved=0.97),
)
SHARE = 0.01
"""Upper bound of routing's own share of a routed step."""
HEAD = (
    "| work | variant | peer routed | dense | routed | target | memory | speed-up | of ideal | verdict |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


NOT_JUDGED = "not judged"


def table(measurements: Iterable[Facts], *, judged: bool = True) -> str:
    """All rows as Markdown, hit or missed, and every measurement below; tiny shapes are not judged."""
    listed = list(measurements)
    lines = [HEAD, *(_line(row, listed, judged) for row in ROWS)]
    for one in listed:
        if one.get("row") == "routing" and one["status"] == "ok":
            fine = one["share"] <= SHARE and not one["waits"]
            answer = ("hit" if fine else "MISS") if judged else NOT_JUDGED
            lines.append(
                f"| routing's own share ({one['name']}) | | - | | {one['routing_ms']:.2f} of {one['step_ms']:.1f} ms | "
                f"<= {SHARE:.0%}, no waits | | | {one['share']:.2%}, {sum(one['waits'].values())} waits | {answer} |"
            )
    return "\n".join([*lines, "", *(f"- {describe(one)}" for one in listed if one.get("row") != "set-up")])


def best(row: Row, measurements: Iterable[Facts]) -> Facts | None:
    """The fastest routed measurement of a row, of those that fit into its memory where some do."""
    done = [one for one in measurements if one.get("row") == row.key and one["status"] == "ok" and "routed" in one]
    return min(
        [one for one in done if _fits(row, one)] or done, key=lambda one: one["routed"]["median_ms"], default=None
    )


def _fits(row: Row, one: Facts) -> bool:
    peak = one["routed"].get("peak_gib")
    return row.gib is None or peak is None or peak <= row.gib


def _line(row: Row, measurements: list[Facts], judged: bool) -> str:
    one = best(row, measurements)
    target = _target(row)
    if one is None:
        tried = [m for m in measurements if m.get("row") == row.key]
        state = "; ".join(f"{m['name']} {m['status']}" for m in tried) or "not run"
        return f"| {row.work} | | {row.peer} | | | {target} | | | | {state} |"
    dense, routed = one["dense"], one["routed"]
    memory = f"{routed['peak_gib']:.1f} GiB" if routed.get("peak_gib") else ""
    name = f"{one['name']} ({', '.join(one['beyond'])})" if one.get("beyond") else one["name"]
    cells = [row.work, name, row.peer, _speed(row, dense), _speed(row, routed), target, memory]
    cells += [f"x{one['speedup']:.2f}", f"{one['achieved']:.3f} (of x{one['ideal']:.2f})"]
    cells.append(verdict(row, one) if judged else NOT_JUDGED)
    return f"| {' | '.join(cells)} |"


def verdict(row: Row, one: Facts) -> str:
    """`hit`, `MISS` with what was missed, or `reported` where nothing is asked."""
    routed = one["routed"]
    checks = [
        ("time", row.milliseconds is None or routed["median_ms"] <= row.milliseconds),
        ("speed", row.images is None or routed["images_per_second"] >= row.images),
        ("memory", _fits(row, one)),
        ("of ideal", row.achieved is None or one["achieved"] >= row.achieved),
    ]
    if row.milliseconds is row.images is row.gib is row.achieved is None:
        return "reported"
    missed = [name for name, fine in checks if not fine]
    return f"MISS: {', '.join(missed)}" if missed else "hit"


def _speed(row: Row, one: Facts) -> str:
    if row.unit == "img/s":
        return f"{one['median_ms']:.1f} ms, {one['images_per_second']:,.0f} img/s"
    return f"{one['median_ms']:.1f} ms"


def _target(row: Row) -> str:
    words = []
    if row.milliseconds is not None:
        words.append(f"<= {row.milliseconds:g} ms")
    if row.images is not None:
        words.append(f">= {row.images:,.0f} img/s")
    if row.gib is not None:
        words.append(f"<= {row.gib:g} GiB")
    if row.achieved is not None:
        words.append(f">= {row.achieved:g} of ideal")
    return ", ".join(words) or "reported"
