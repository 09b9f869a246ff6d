"""The page of `tread plan --html`: one file that works from disk, without a network, and computes like the command.

Template, style and scripts are in this folder; all are inlined into the one document.
"""

import json
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from tread.files import write_text
from tread.report.planning import tables
from tread.report.planning.models import Model, documents
from tread.report.planning.settings import Run
from tread.routing import risks
from tread.routing.plan import PRESETS, RoutePlan
from tread.routing.route import Route

SCRIPTS = ("estimate.js", "noise.js", "state.js", "picture.js", "show.js", "plan.js")
"""The scripts in load order; the last one starts the page."""


def write_page(path: Path, model: Model, run: Run, plan: RoutePlan) -> None:
    """Write the page, opened at this model, run and plan."""
    write_text(path, page(model, run, plan))


def page(model: Model, run: Run, plan: RoutePlan) -> str:
    """The text of the page."""
    here = files("tread.report.planning")
    text = (here / "plan.html").read_text(encoding="utf-8")
    parts = {
        "/* style */": (here / "plan.css").read_text(encoding="utf-8"),
        "/* data */": f"const DATA = {_script_json(data(model, run, plan))};",
        "/* script */": "\n".join((here / name).read_text(encoding="utf-8") for name in SCRIPTS),
    }
    for mark, part in parts.items():
        text = text.replace(mark, part)
    return text


def data(model: Model, run: Run, plan: RoutePlan) -> dict[str, Any]:
    """The script's input: every model, the tables, and the initial settings."""
    return {
        "models": documents(),
        "presets": {name: route.to_config() for name, route in PRESETS.items()},
        "precisions": tables.PRECISIONS,
        "full_precisions": tables.FULL_PRECISIONS,
        "optimizers": tables.OPTIMIZERS,
        "cards": tables.CARDS,
        "reserved": tables.RESERVED,
        "spare": tables.SPARE,
        "working": tables.WORKING,
        "apart_bytes": tables.APART_BYTES,
        "bias_bytes": tables.BIAS_BYTES,
        "risks": risk_sentences(),
        "start": {"model": model.name, **asdict(run), "tread_config": plan.to_config()},
    }


def risk_sentences() -> dict[str, Any]:
    """The warnings of `routing.risks` as templates with placeholders, and their limits."""
    route, depth, tokens = Route(selection_ratio=0.75, start_layer_idx=0, end_layer_idx=4), 5, 64
    plan = RoutePlan(routes=(route,)).resolve(depth)
    first, last, passage = (text.replace(str(route), "{route}") for text in risks.layer_risks(plan))
    (few,), (adapter,) = risks.token_risks(plan, tokens), risks.adapter_risks(plan)
    return {
        "first": first,
        "earliest_start": risks.EARLIEST_START,
        "last": last.replace(f"of {depth} layers", "of {depth} layers"),
        "passage": passage.replace(f"0 of {depth} layers", "{left} of {depth} layers"),
        "fewest_layers": risks.FEWEST_LAYERS,
        "few": few.replace(str(route), "{route}").replace("keeps 16 of 64", "keeps {kept} of {tokens}"),
        "few_tokens": risks.FEW_TOKENS,
        "high_ratio": risks.HIGH_RATIO,
        "adapter": adapter.replace(str(route), "{route}"),
        "adapter_ratio": risks.ADAPTER_RATIO,
    }


def _script_json(value: Any) -> str:
    """JSON that cannot end the script element it is in."""
    return json.dumps(value, separators=(",", ":")).replace("</", "<\\/")
