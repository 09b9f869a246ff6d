"""What `tread plan MODEL` prints: tokens by layer, FLOPs, memory, warnings and what fits which GPU."""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

from tread.errors import RiskWarning
from tread.report.planning.cluster import Cluster, Step, calls, steps
from tread.report.planning.estimate import PARTS, Choice, Estimate, choices, estimate
from tread.report.planning.links import Links
from tread.report.planning.models import Model
from tread.report.planning.offload import offload_lines, offload_report, offloading
from tread.report.planning.settings import Run
from tread.report.planning.tables import CARDS, GIB, RESERVED
from tread.routing.plan import RoutePlan
from tread.routing.risks import adapter_risks, layer_risks, token_risks
from tread.words import counted

HOW = {
    "none": "not checkpointed",
    "selective": "selective checkpointing",
    "full": "checkpointed",
    "dense": "dense steps checkpointed",
}


def report(model: Model, run: Run, plan: RoutePlan) -> dict[str, Any]:
    """The full report of a run in JSON types; `plan` is resolved for the model."""
    cost = estimate(model, run, plan)
    dense, routed = cost.memory
    return {
        "model": model.name,
        "title": model.title,
        "settings": asdict(run),
        "tread_config": plan.to_config(),
        "tokens": {"image": cost.image, "reference": cost.reference, "padding": cost.padding, "text": run.text},
        "layers": [
            {"tokens": tokens, "flops": flops} for tokens, flops in zip(cost.layers, cost.layer_flops, strict=True)
        ],
        "flops": {"dense": cost.flops[0], "routed": cost.flops[1]},
        "speedup": cost.speedup,
        "memory": {"dense": dense, "routed": routed},
        "gib": {"dense": cost.gib[0], "routed": cost.gib[1]},
        "warnings": risks(run, plan, cost),
        "fits": [asdict(choice) for choice in choices(model, replace(run, offload=0), plan)],
        "offload": offload_report(offloading(model, run, plan)),
    }


def risks(run: Run, plan: RoutePlan, cost: Estimate) -> list[str]:
    """The plan's risk warnings, worded as in a job."""
    adapter = adapter_risks(plan) if run.way != "full" else []
    return layer_risks(plan) + token_risks(plan, cost.image) + adapter


def describe(model: Model, run: Run, plan: RoutePlan) -> str:
    """The report as text; risks become warnings."""
    cost = estimate(model, run, plan)
    lines = [_heading(model, run, cost), "", *_layer_lines(cost), ""]
    lines += [
        "                        dense     routed",
        f"TFLOPs of a step   {cost.flops[0] / 1e12:10.1f} {cost.flops[1] / 1e12:10.1f}",
        f"ideal speed-up                {cost.speedup:10.2f}x",
        "",
        "GiB of GPU memory       dense     routed",
    ]
    for part in PARTS:
        dense, routed = (memory[part] / GIB for memory in cost.memory)
        if max(dense, routed) >= 0.005:
            lines.append(f"  {part:<16} {dense:10.2f} {routed:10.2f}")
    lines.append(f"  {'together':<16} {cost.gib[0]:10.2f} {cost.gib[1]:10.2f}")
    lines += ["", *_fit_lines(model, run, plan)]
    lines += ["", *offload_lines(model, offloading(model, run, plan))] if run.way != "full" else []
    for risk in risks(run, plan, cost):
        warnings.warn(risk, RiskWarning, stacklevel=2)
    return "\n".join(lines)


def describe_cluster(model: Model, run: Run, plan: RoutePlan, cluster: Cluster, links: Links) -> str:
    """The part of the report about several GPUs."""
    both = steps(model, run, plan, cluster, links)
    how = f", shards over {cluster.shard_size}" if cluster.shard_size > 1 else ""
    samples = run.batch * cluster.gpus
    lines = [
        f"{counted(cluster.gpus, 'GPU')} on {counted(cluster.nodes, 'node')}, {cluster.parallel}{how}; "
        f"{counted(samples, 'sample')} a step",
        "                             dense     routed",
    ]
    rows: list[tuple[str, Callable[[Step], float], str]] = [
        ("GiB on each", lambda step: step.gib, ".1f"),
        ("ms of work", lambda step: 1e3 * step.compute, ",.0f"),
        ("ms of collectives", lambda step: 1e3 * step.collectives, ",.1f"),
        ("  not hidden", lambda step: 1e3 * step.exposed, ",.1f"),
        ("ms of the update", lambda step: 1e3 * step.update, ",.1f"),
        ("ms of a step", lambda step: 1e3 * step.seconds, ",.0f"),
        ("samples a second", lambda step: samples / step.seconds, ",.2f"),
    ]
    for name, value, form in rows:
        lines.append(f"  {name:<21} {value(both[0]):>10{form}} {value(both[1]):>10{form}}")
    for call, times in Counter(calls(model, run, cluster)).items():
        among = f"{counted(call.ranks, 'GPU')} on {counted(call.nodes, 'node')}"
        often = f"{times} x " if times > 1 else ""
        name = call.collective.replace("_", "-")
        lines.append(f"  {name}: {often}{call.size / 1e9:.2f} GB among {among} ({links.of(call.nodes).source})")
    return "\n".join(lines)


def report_cluster(model: Model, run: Run, plan: RoutePlan, cluster: Cluster, links: Links) -> dict[str, Any]:
    """The same in JSON types."""
    dense, routed = (
        asdict(step) | {"seconds": step.seconds, "gib": step.gib} for step in steps(model, run, plan, cluster, links)
    )
    sources = {"node": links.node.source, "network": links.network.source}
    moved = [asdict(call) | {"seconds": call.seconds(links)} for call in calls(model, run, cluster)]
    return asdict(cluster) | {"links": sources, "collectives": moved, "dense": dense, "routed": routed}


def _heading(model: Model, run: Run, cost: Estimate) -> str:
    what = "all weights" if run.way == "full" else f"LoRA of rank {run.rank}"
    if run.way == "attention":
        what += " on attention"
    frames = f", {run.frames} frames" if run.frames > 1 else ""
    frames += f" with {counted(run.image_layers, 'layer')}" if run.image_layers else ""
    parts = [f"{cost.image:,} token{'' if cost.image == 1 else 's'}"]
    if cost.reference:
        parts.append(f"{cost.reference:,} of {'the given image' if run.image_layers else 'references'}")
    if cost.padding:
        parts.append(f"{cost.padding:,} of padding")
    if run.text:
        parts.append(f"{run.text} of text")
    graphs = ", CUDA graphs" if run.graphs else ""
    graphs += f", {counted(run.offload, 'layer')} offloaded" if run.offload else ""
    return (
        f"{model.title}: {model.weights['all'] / 1e9:.2f} billion weights in {model.depth} layers\n"
        f"{run.width} x {run.height} pixels{frames}: {' + '.join(parts)}; batch {run.batch}\n"
        f"{what}, {run.precision}, {run.optimizer}, {HOW[run.checkpointing]}{graphs}"
    )


def _layer_lines(cost: Estimate) -> list[str]:
    lines = ["layers        tokens   TFLOPs each"]
    start, total = 0, cost.image + cost.reference + cost.padding
    for (tokens, flops), group in groupby(zip(cost.layers, cost.layer_flops, strict=True)):
        count = len(list(group))
        span = f"{start}..{start + count - 1}" if count > 1 else str(start)
        dropped = f"   drops {1 - tokens / total:.0%}" if tokens < total else ""
        lines.append(f"  {span:<10} {tokens:>7,}   {flops / 1e12:11.3f}{dropped}")
        start += count
    return lines


def _fit_lines(model: Model, run: Run, plan: RoutePlan) -> list[str]:
    here = "" if run.offload else "; <- these settings"
    lines = [f"fits a GPU of ({RESERVED:g} GiB is left for the driver and the allocator{here})"]
    for choice in choices(model, replace(run, offload=0), plan):
        name = f"{choice.precision}, {HOW[choice.checkpointing]}"
        chosen = (choice.precision, choice.checkpointing) == (run.precision, run.checkpointing)
        mark = " <-" if chosen and not run.offload else ""
        lines.append(
            f"  {name:<32} routed {choice.gib[1]:6.1f} GiB: {_card(choice, 1):<16} dense {choice.gib[0]:6.1f} GiB: "
            f"{_card(choice, 0)}{mark}"
        )
    return lines


def _card(choice: Choice, index: int) -> str:
    card: Sequence[int | None] = choice.cards
    size = card[index]
    return f"more than {CARDS[-1]} GB" if size is None else f"{size} GB"
