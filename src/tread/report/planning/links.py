"""Links between GPUs: how long a collective takes, by assumption or by a table that `benchmarks.collectives` measured.

A link is a bus bandwidth that depends on the size of a call: what leaves a GPU, over the time. In a collective among n
GPUs that is 2 (n - 1) / n of the bytes of an all-reduce, and (n - 1) / n of those of an all-gather or reduce-scatter,
so a table of one number of GPUs tells about another on links of the same kind. Between nodes each GPU has an adapter of
its own: groups with one GPU of each node, which call at the same time, share what one group with all GPUs has alone.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tread.errors import ConfigError, shortened

SHARES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
"""Times (n - 1) / n of the bytes leave a GPU."""
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Link:
    """Bus bandwidth by collective and size; sizes between two rows are interpolated, others take the nearest row."""

    rows: Mapping[str, Sequence[tuple[float, float]]]
    """Bytes of a call and bytes per second, by collective, ascending."""
    source: str
    adapters: int | None = None
    """GPUs of a node that took part in what the rows tell; None: within a node."""

    def seconds(self, collective: str, size: float, ranks: int, per_node: int) -> float:
        """How long one call over `size` bytes takes among `ranks` GPUs, `per_node` of them in each node."""
        if ranks == 1 or size == 0:
            return 0.0
        if self.adapters is not None:
            size *= self.adapters / per_node  # the other groups of the node call too
        return SHARES[collective] * (ranks - 1) / ranks * size / self._bandwidth(collective, size)

    def _bandwidth(self, collective: str, size: float) -> float:
        rows = self.rows[collective]
        if size <= rows[0][0]:
            return rows[0][1] * size / rows[0][0]  # as long as the smallest call
        for (low, slow), (high, fast) in pairwise(rows):
            if size <= high:
                part = math.log(size / low) / math.log(high / low)
                return slow + part * (fast - slow)
        return rows[-1][1]


def assumed(gb_per_s: float, microseconds: float, adapters: int | None = None) -> Link:
    """A link by its two numbers: bandwidth, of each adapter if there are several, and the time of the smallest call."""
    sizes = [2.0**power for power in range(16, 35, 2)]
    peak, start = gb_per_s * GB * (adapters or 1), microseconds / 1e6
    rows = [(size, size / (start + size / peak)) for size in sizes]
    source = f"assumed: {gb_per_s:g} GB/s" + (" for each GPU" if adapters else "")
    return Link(rows=dict.fromkeys(SHARES, rows), source=source, adapters=adapters)


@dataclass(frozen=True, kw_only=True)
class Links:
    """Within a node, and between nodes (per GPU)."""

    node: Link
    network: Link

    def of(self, nodes: int) -> Link:
        """The one that a collective over so many nodes waits for."""
        return self.node if nodes == 1 else self.network


ASSUMED = Links(node=assumed(350, 25), network=assumed(40, 60, adapters=8))
"""NVLink of an H200 (450 GB/s each way) and an adapter of 400 Gb/s for each GPU, at what collectives reach of them."""


def read_links(paths: Sequence[Path]) -> Links:
    """Measured links in place of the assumed ones: a table of one node, of several, or one of each."""
    found = {"node": ASSUMED.node, "network": ASSUMED.network}
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
        kind, adapters = ("node", None) if nodes == 1 else ("network", world // nodes)
        found[kind] = Link(rows={name: sorted(each) for name, each in rows.items()}, source=source, adapters=adapters)
    return Links(**found)
