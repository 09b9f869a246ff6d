"""Layers in host memory (`offload`): how many a card needs, and which GPUs are slow enough to hide the copies.

Every layer is counted as checkpointed, because offloaded layers always are.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tread.errors import ConfigError
from tread.report.planning.estimate import estimate, forward_flops
from tread.report.planning.models import Model
from tread.report.planning.settings import Run
from tread.report.planning.tables import GIB, RESERVED
from tread.report.planning.weights import layer_bytes, moved
from tread.routing.plan import RoutePlan

CARDS = (8, 12, 16, 24)
"""Memory in GB of the GPUs that offloading is for."""
UNMOVED = "int8-bnb"
"""A precision whose weights cannot be moved between devices; `tread finetune` refuses to offload it."""
LINKS = (12, 25)
"""GB/s from host memory to a GPU, as PCIe 3 and 4 of 16 lanes reach them."""


@dataclass(frozen=True, kw_only=True)
class Offloading:
    """The effect of offloading in one precision."""

    precision: str
    layer_gib: float
    """The largest layer."""
    fewest: dict[int, int | None]
    """Card -> the fewest layers that must be offloaded to fit it; None if all of them are not enough."""
    hides: dict[int, tuple[float, float]]
    """GB/s -> the TFLOP/s, dense and routed, up to which the copies of all layers overlap with a forward."""


def offloading(model: Model, run: Run, plan: RoutePlan) -> list[Offloading]:
    """The effect of offloading in each precision of an adapter's base, routed."""
    if run.way == "full":
        return []
    rows = []
    for precision in dict.fromkeys((run.precision, "bf16", "fp8", "nf4")):
        if precision == UNMOVED:
            continue
        sizes = layer_bytes(model, precision)
        resident = replace(run, precision=precision, checkpointing="full", graphs=False, offload=0)
        whole = estimate(model, resident, plan)
        flops = forward_flops(model, run, [max(whole.layers)] * model.depth), forward_flops(model, run, whole.layers)
        hides = {gb: (gb * flops[0] / sum(sizes) / 1e3, gb * flops[1] / sum(sizes) / 1e3) for gb in LINKS}
        fewest = {card: fewest_layers(model, precision, whole.gib[1], card) for card in CARDS}
        rows.append(Offloading(precision=precision, layer_gib=max(sizes) / GIB, fewest=fewest, hides=hides))
    return rows


def fewest_layers(model: Model, precision: str, gib: float, card: int) -> int | None:
    """The fewest layers to offload so that a run of `gib` GiB fits a card; None if none suffice."""
    for number in range(model.depth + 1):
        away, slots = moved(model, precision, number)
        if gib + (slots - away) / GIB <= card - RESERVED:
            return number
    return None


def offloaded(model: Model, run: Run, plan: RoutePlan, given: str | None) -> Run:
    """The run with `--offload`: a number of layers, or auto for the fewest that fit the smallest possible card."""
    if given is None or given == "0":
        return run
    if run.way == "full":
        raise ConfigError(f"--offload is {given}, but all weights are trained, and only frozen ones can be offloaded.")
    if run.precision == UNMOVED:
        raise ConfigError(
            f"--offload is {given}, but --precision is {UNMOVED}, whose weights cannot be moved: use int8 or nf4."
        )
    run = replace(run, checkpointing="full", graphs=False)
    if given == "auto":
        gib = estimate(model, run, plan).gib[1]
        numbers = (fewest_layers(model, run.precision, gib, card) for card in CARDS)
        return replace(run, offload=next((number for number in numbers if number is not None), model.depth))
    if not given.isdecimal() or int(given) > model.depth:
        raise ConfigError(f"--offload is {given!r}; give a number of layers up to {model.depth}, or auto.")
    return replace(run, offload=int(given))


def offload_lines(model: Model, found: Sequence[Offloading]) -> list[str]:
    """The table of the report: layers to offload by card, and where copies begin to limit."""
    if not found:
        return []
    heads = "".join(f"{f'{card} GB':>8}" for card in CARDS)
    speeds = "".join(f"{f'{gb} GB/s':>20}" for gb in LINKS)
    lines = [f"layers of {model.depth} to offload, checkpointed and routed; copies hide up to so many TFLOP/s"]
    lines.append(f"  {'':<12} {heads} {speeds}")
    for one in found:
        needed = "".join(f"{'-' if number is None else number:>8}" for number in one.fewest.values())
        hides = "".join(f"{f'{dense:.0f} dense, {routed:.0f}':>20}" for dense, routed in one.hides.values())
        lines.append(f"  {one.precision:<12} {needed} {hides}")
    return lines


def offload_report(found: Sequence[Offloading]) -> list[dict[str, Any]]:
    """The same in JSON types."""
    return [asdict(one) for one in found]
