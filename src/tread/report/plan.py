"""`tread plan`: tokens per layer, the ideal speed-up, and the memory that a run of a model needs.

For routes alone, depth, width and tokens are given. For a model by name they are known, and so is its memory
(`planning/`).
"""

import warnings
from collections.abc import Mapping, Sequence
from json import dumps
from pathlib import Path
from typing import Any

from tread.config.documents import find_recipe, read_document, settled
from tread.config.jobs import job_of
from tread.errors import ConfigError, RiskWarning, check_int, shortened, shown
from tread.files import is_file
from tread.report.planning.cluster import make_cluster
from tread.report.planning.links import read_links
from tread.report.planning.models import documents, find_model
from tread.report.planning.offload import offloaded
from tread.report.planning.page import write_page
from tread.report.planning.settings import make_run
from tread.report.planning.text import describe, describe_cluster, report, report_cluster
from tread.routing.budget import kept_count
from tread.routing.cost import LayerShape, plan_cost
from tread.routing.plan import PRESETS, RoutePlan, read_mapping
from tread.routing.risks import layer_risks, token_risks


def describe_plan(config: str, *, depth: int, width: int, tokens: int, context: int = 0) -> str:
    """The text of `tread plan`."""
    if config in documents():
        raise ConfigError(f"{config} is a model, whose shape is known: leave out --depth, --width and --tokens.")
    check_int(tokens, "--tokens", 1)
    plan = _plan(config)
    if plan is None:
        return (
            f"{config} has no tread_config: the run is dense, every layer sees all {tokens} tokens. Name a preset in "
            f"its place to see what routes would gain: {', '.join(PRESETS)}."
        )
    plan = plan.resolve(depth)
    cost = plan_cost(plan, LayerShape(width=width, context=context), tokens=tokens)
    lines = [f"{depth} layers, width {width}, {tokens} tokens" + (f" + {context} of text" if context else "")]
    for route in plan.routes:
        kept = kept_count(tokens, route.selection_ratio)
        window = f"layers {route.start_layer_idx}..{route.end_layer_idx}"
        lines.append(f"  {window}: {kept} of {tokens} tokens (drops {route.selection_ratio:.0%})")
    mib = 2**20
    lines += [
        "                            dense      routed",
        f"GFLOPs forward, a sample {cost.dense_flops / 1e9:8.1f}    {cost.routed_flops / 1e9:8.1f}",
        f"MiB of activations       {cost.dense_bytes / mib:8.1f}    {cost.routed_bytes / mib:8.1f}",
        f"ideal speed-up                       {cost.speedup:8.2f}x",
    ]
    for risk in layer_risks(plan) + token_risks(plan, tokens):
        warnings.warn(risk, RiskWarning, stacklevel=2)
    return "\n".join(lines)


def plan_model(
    name: str,
    *,
    routes: str | None,
    lora: int | None,
    targets: str | None,
    full: bool,
    json: bool,
    html: Path | None,
    gpus: int | None = None,
    per_node: int | None = None,
    parallel: str | None = None,
    shard_size: int | None = None,
    collectives: Sequence[Path] = (),
    offload: str | None = None,
    **settings: Any,
) -> str:
    """The text of `tread plan MODEL`; `settings` are those of `make_run`. With `html` the page is written too.

    With `gpus` it adds the time of a step on that many GPUs; `per_node`, `parallel` and `shard_size` describe how they
    share the model.
    """
    several = {"--per-node": per_node, "--parallel": parallel, "--shard-size": shard_size}
    for option, value in {**several, "--collectives": collectives or None}.items():
        if gpus is None and value is not None:
            raise ConfigError(f"{option} is for several GPUs: give --gpus too.")
    cluster = None if gpus is None else make_cluster(gpus, 8 if per_node is None else per_node, parallel, shard_size)
    links = read_links(collectives)
    a_file = is_file(find_recipe(Path(name)))
    if name in PRESETS or name.lstrip().startswith("{") or a_file:
        what = "is a file, no model" if a_file else "is a preset of routes" if name in PRESETS else "are routes"
        raise ConfigError(
            f"{shown(name)} {what}: name the model first, as in `tread plan flux --routes {shortened(name, 120)}`, or "
            "give the shape of one, with --depth, --width and --tokens."
        )
    model = find_model(name)
    for option, value in {"--lora": lora, "--targets": targets}.items():
        if value is not None and not model.pretrained:
            raise ConfigError(f"{option} is {value}, but {name} is trained from scratch, all weights; leave it out.")
        if value is not None and full:
            raise ConfigError(f"{option} is {value}, but --full trains all weights; leave one of them out.")
    way = "full" if full else None
    if targets == "attention":
        way = "attention" if "attention" in model.lora else "lora"
    run = make_run(model, rank=16 if lora is None else lora, way=way, **settings)
    config = routes or ("paper" if run.way == "full" else "lora")
    plan = _plan(config, "--routes")
    if plan is None:
        raise ConfigError(f"--routes is {config!r}, which has no tread_config; name a preset: {', '.join(PRESETS)}.")
    resolved = plan.resolve(model.depth)
    if offload is not None and (html is not None or cluster is not None):
        raise ConfigError("--offload is for the report of one GPU: leave out --html and --gpus, or --offload.")
    run = offloaded(model, run, resolved, offload)
    if html is not None:
        write_page(html, model, run, resolved)
    if json:
        more = {} if cluster is None else {"cluster": report_cluster(model, run, resolved, cluster, links)}
        return dumps(report(model, run, resolved) | more, indent=2)
    text = describe(model, run, resolved)
    if cluster is not None:
        text += "\n\n" + describe_cluster(model, run, resolved, cluster, links)
    return text if html is None else f"{text}\n\npage: {html}"


def _plan(config: str, name: str = "tread_config") -> RoutePlan | None:
    """The plan of routes, or of a config of either job that may have some; None if its run is dense."""
    path = find_recipe(Path(config))
    if config in PRESETS or not is_file(path):
        return RoutePlan.from_config(read_mapping(config, name))
    document = read_document(path, name)
    job = job_of(document, path) if isinstance(document, Mapping) else None
    if job is None:
        return RoutePlan.from_config(read_mapping(path, name))
    if job == "train":
        from tread.pretrain.config import layered

        routes = settled(layered([config])["model"].get("tread_config"))
    else:
        from tread.finetune.config import read_mapping as read_keys

        unread: dict[str, str] = {}  # files that no plan depends on
        routes = read_keys(path, unread=unread).get("tread_config")
        if "tread_config" in unread:
            raise ConfigError(unread["tread_config"])
    return None if routes is None else RoutePlan.from_config(routes)
