"""A run on several GPUs: memory, communication and time of a step on each, dense and routed.

- Compute time of one GPU: FLOPs at `PRODUCTS`, activation traffic at `PASSING`, and the update of weights at `COPYING`,
  the rates of an H200. The first two were fitted to its measured rows (docs/scale.md says how well), the last is its
  copy bandwidth.
- ddp all-reduces float32 gradients. fsdp keeps 1 / n of weights, gradients, optimizer and average on each of n GPUs: it
  gathers a layer's weights in bf16 before its forward and again before its backward, and reduce-scatters its gradients
  in float32. hsdp does that among `shard_size` GPUs and all-reduces between these groups.
- Collectives overlap with the layers' compute, those of gradients with backward, and links overlap with each other.
  Exposed are one call, which overlaps with nothing, and whatever takes longer on one link than the compute it overlaps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tread.errors import ConfigError, check_choice, check_int
from tread.report.planning.estimate import Estimate, estimate, passed
from tread.report.planning.links import Links
from tread.report.planning.models import Model
from tread.report.planning.settings import Run
from tread.report.planning.tables import GIB
from tread.routing.plan import RoutePlan

PRODUCTS, PASSING, COPYING = 563e12, 765e9, 4.2e12
"""FLOP/s of a training step's matrix products, and bytes/s of its activation traffic and of copies, on an H200."""
UPDATED = 36
"""Bytes that the update of one float32 weight reads and writes: weight, gradient, two moments, average."""
BUCKET = 25 * 2**20
"""Bytes of one gradient bucket of ddp."""
BACKWARD = 2 / 3
"""Lower bound of backward's share of a step's compute."""
PARALLEL = ("ddp", "fsdp", "hsdp")
SHARDED = ("weights", "optimizer", "average")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The number of GPUs, and how they share a model."""

    gpus: int
    per_node: int
    parallel: str
    shard_size: int
    """GPUs that hold one copy of the weights together: 1 with ddp, all of them with fsdp."""

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.per_node)


def make_cluster(gpus: int, per_node: int = 8, parallel: str | None = None, shard_size: int | None = None) -> Cluster:
    """A cluster, checked; by default ddp, and a node as the group of hsdp."""
    check_int(gpus, "--gpus", 1)
    check_int(per_node, "--per-node", 1)
    parallel = "ddp" if parallel is None else check_choice(parallel, "--parallel", PARALLEL)
    if gpus > per_node and gpus % per_node:
        raise ConfigError(f"--gpus is {gpus}; it must be a multiple of --per-node, which is {per_node}.")
    if shard_size is not None and parallel != "hsdp":
        raise ConfigError(f"--shard-size is {shard_size}, but --parallel is {parallel}: it is for hsdp; leave it out.")
    size = {"ddp": 1, "fsdp": gpus}.get(parallel, min(per_node, gpus) if shard_size is None else shard_size)
    check_int(size, "--shard-size", 1)
    if gpus % size:
        raise ConfigError(f"--shard-size is {size}; it must divide --gpus, which is {gpus}.")
    return Cluster(gpus=gpus, per_node=per_node, parallel=parallel, shard_size=size)


@dataclass(frozen=True, kw_only=True)
class Call:
    """All calls of one collective in a step."""

    collective: str
    size: float
    """Bytes of all calls together."""
    count: int
    ranks: int
    nodes: int

    def seconds(self, links: Links) -> float:
        """Seconds of all calls together."""
        return self.count * links.of(self.nodes).seconds(
            self.collective, self.size / self.count, self.ranks, self.ranks // self.nodes
        )


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step on each GPU, in seconds and bytes."""

    compute: float
    update: float
    collectives: float
    exposed: float
    """Seconds of collectives that do not overlap with compute."""
    memory: dict[str, float]

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed + self.update

    @property
    def gib(self) -> float:
        return sum(self.memory.values()) / GIB


def compute_seconds(model: Model, run: Run, flops: float, counts: Sequence[int]) -> float:
    """Forward, backward and recomputation on one GPU, of layers that see `counts` image tokens."""
    again = 2 if run.checkpointing == "full" else 1
    return flops / PRODUCTS + again * passed(model, run, counts) / PASSING


def trained_weights(model: Model, run: Run) -> float:
    """Number of weights that get a gradient."""
    return model.weights["all"] if run.way == "full" else run.rank * model.lora[run.way]


def calls(model: Model, run: Run, cluster: Cluster) -> list[Call]:
    """The collectives of one step."""
    gradients, size, gpus = trained_weights(model, run) * 4.0, cluster.shard_size, cluster.gpus
    if size == 1:
        count = max(1, round(gradients / BUCKET))
        return [Call(collective="all_reduce", size=gradients, count=count, ranks=gpus, nodes=cluster.nodes)]
    within = {"count": model.depth, "ranks": size, "nodes": -(-size // cluster.per_node)}
    gathered = Call(collective="all_gather", size=2.0 * model.weights["all"], **within)
    collectives = [gathered, gathered, Call(collective="reduce_scatter", size=gradients, **within)]
    if size < gpus:
        between = {"count": model.depth, "ranks": gpus // size, "nodes": min(gpus // size, cluster.nodes)}
        collectives.append(Call(collective="all_reduce", size=gradients / size, **between))
    return collectives


def steps(model: Model, run: Run, plan: RoutePlan, cluster: Cluster, links: Links) -> tuple[Step, Step]:
    """A step of `run.batch` samples on each GPU: dense and routed."""
    cost = estimate(model, run, plan)
    counts = ([cost.image + cost.reference] * model.depth, cost.layers)
    taken = [(call, call.seconds(links)) for call in calls(model, run, cluster)]
    result = []
    for index in (0, 1):
        compute = compute_seconds(model, run.sides[index], cost.flops[index], counts[index])
        result.append(
            Step(
                compute=compute,
                update=trained_weights(model, run) / cluster.shard_size * UPDATED / COPYING,
                collectives=sum(seconds for _, seconds in taken),
                exposed=_exposed(taken, compute),
                memory=_memory(model, run, cluster, cost, index),
            )
        )
    return result[0], result[1]


def _exposed(taken: Sequence[tuple[Call, float]], compute: float) -> float:
    """Seconds of collectives that do not overlap with compute."""
    alone = max(seconds / call.count for call, seconds in taken)
    beyond = [0.0]
    for across in (False, True):  # the links within a node, and between nodes
        on_link = [(call, seconds) for call, seconds in taken if (call.nodes > 1) == across]
        gradients = sum(seconds for call, seconds in on_link if call.collective != "all_gather")
        beyond += [sum(seconds for _, seconds in on_link) - alone - compute, gradients - alone - BACKWARD * compute]
    return alone + max(beyond)


def _memory(model: Model, run: Run, cluster: Cluster, found: Estimate, index: int) -> dict[str, float]:
    """Bytes on one GPU: sharded parts divided by `shard_size`, plus the layers gathered at one time."""
    parts, size = dict(found.memory[index]), cluster.shard_size
    if size == 1:
        return parts
    for part in SHARDED:
        parts[part] /= size
    gradients = trained_weights(model, run) * 4.0 / size
    parts["gradients"] = max(0.0, gradients - parts["activations"] - parts["working"])
    layer = model.weights["all"] / model.depth
    parts["gathered"] = 2 * 2.0 * layer + 4.0 * layer  # two layers in bf16, and the gradient of one in float32
    return parts
