"""Links between GPUs: the time of a collective, assumed or from a table that `benchmarks.collectives` measured.

A link is a bus bandwidth (bytes that leave a GPU, over the time) as a function of message size. In a collective among n
GPUs, 2 (n - 1) / n of the bytes of an all-reduce leave each GPU, and (n - 1) / n of those of an all-gather or
reduce-scatter, so a table measured on one number of GPUs holds for another on the same type of link. Between nodes each
GPU has its own adapter: concurrent groups with one GPU per node share the bandwidth that a single group of all GPUs has
alone.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tread.errors import ConfigError, shortened

SHARES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
"""Bytes that leave a GPU, as a multiple of (n - 1) / n of the message."""
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Link:
    """Bus bandwidth by collective and size; sizes between two rows are interpolated, others take the nearest row."""

    rows: Mapping[str, Sequence[tuple[float, float]]]
    """Bytes of a call and bytes per second, by collective, ascending."""
    source: str
    adapters: int | None = None
    """GPUs per node that took part in the measured collectives; None for a link within a node."""

    def seconds(self, collective: str, size: float, ranks: int, per_node: int) -> float:
        """Seconds of one call over `size` bytes among `ranks` GPUs, `per_node` of them in each node."""
        if ranks == 1 or size == 0:
            return 0.0
        if self.adapters is not None:
            size *= self.adapters / per_node  # the node's other groups call at the same time
        return SHARES[collective] * (ranks - 1) / ranks * size / self._bandwidth(collective, size)

    def _bandwidth(self, collective: str, size: float) -> float:
        rows = self.rows[collective]
        if size <= rows[0][0]:
            return rows[0][1] * size / rows[0][0]  # latency-bound: takes as long as the smallest call measured
        for (low, slow), (high, fast) in pairwise(rows):
            if size <= high:
                part = math.log(size / low) / math.log(high / low)
                return slow + part * (fast - slow)
        return rows[-1][1]


def assumed(gb_per_s: float, microseconds: float, adapters: int | None = None) -> Link:
    """A link from its bandwidth, per adapter if there are several, and its latency."""
    sizes = [2.0**power for power in range(16, 35, 2)]
    peak, start = gb_per_s * GB * (adapters or 1), microseconds / 1e6
    rows = [(size, size / (start + size / peak)) for size in sizes]
    source = f"assumed: {gb_per_s:g} GB/s" + (" for each GPU" if adapters else "")
    return Link(rows=dict.fromkeys(SHARES, rows), source=source, adapters=adapters)


@dataclass(frozen=True, kw_only=True)
class Links:
    """The links within a node, and between nodes (per GPU)."""

    node: Link
    network: Link

    def of(self, nodes: int) -> Link:
        """The bottleneck link of a collective over `nodes` nodes."""
        return self.node if nodes == 1 else self.network


ASSUMED = Links(node=assumed(350, 25), network=assumed(40, 60, adapters=8))
"""NVLink of an H200 (450 GB/s each way) and a 400 Gb/s adapter per GPU, at the bandwidth that collectives reach."""


def read_links(paths: Sequence[Path]) -> Links:
    """Measured links in place of the assumed ones: a table of one node, of several, or one of each."""
    links = {"node": ASSUMED.node, "network": ASSUMED.network}
    for path in paths:
        try:
            table = json.loads(path.read_text())
            rows: dict[str, list[tuple[float, float]]] = {name: [] for name in SHARES}
            for row in table["rows"]:
                rows[row["collective"]].append((float(row["bytes"]), float(row["bus_gb_per_s"]) * GB))
            nodes, world = int(table["nodes"]), int(table["world"])
            source = f"measured on {world} ranks by {shortened(str(table['backend']), 40)}"
            figures = [figure for each in rows.values() for row in each for figure in row]
            if not 1 <= nodes <= world or world < 2 or not all(rows.values()):
                raise ValueError("it has no collectives")
            if not all(0 < figure < math.inf for figure in figures):
                raise ValueError("it has no bandwidth")
        except OSError as error:
            raise ConfigError(f"--collectives: {path} cannot be read ({error.strerror})") from error
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"--collectives: {path} is no table of `python -m benchmarks.collectives` on two processes or more"
            ) from error
        scope, adapters = ("node", None) if nodes == 1 else ("network", world // nodes)
        links[scope] = Link(rows={name: sorted(each) for name, each in rows.items()}, source=source, adapters=adapters)
    return Links(**links)
