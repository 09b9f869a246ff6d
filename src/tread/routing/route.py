"""A route: a window of layers that only part of the tokens pass through.

Layer indices are inclusive and may be negative (-1 is the last layer); `selection_ratio` is the fraction of tokens that
are *dropped* in the window. The constructor checks everything that does not depend on the model's depth,
`Route.resolve(depth)` the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tread.errors import ConfigError, check_fraction, check_int, check_keys, shown

ROUTE_KEYS = ("selection_ratio", "start_layer_idx", "end_layer_idx")


@dataclass(frozen=True, kw_only=True)
class Route:
    """Layers `start_layer_idx..end_layer_idx` run without a fraction `selection_ratio` of the tokens."""

    selection_ratio: float
    start_layer_idx: int
    end_layer_idx: int

    def __post_init__(self) -> None:
        check_fraction(
            self.selection_ratio,
            f"selection_ratio of {self}",
            closed=False,
            fix="It is the fraction of tokens dropped: 0.5 keeps half of them.",
        )
        start = check_int(self.start_layer_idx, f"start_layer_idx of {self}")
        end = check_int(self.end_layer_idx, f"end_layer_idx of {self}")
        if (start < 0) == (end < 0) and start > end:
            raise ConfigError(
                f"{self} starts after it ends: start_layer_idx {start} > end_layer_idx {end}. "
                "Both are inclusive; swap them."
            )

    @property
    def layers(self) -> range:
        """The layers of the window, if the route is resolved."""
        return range(self.start_layer_idx, self.end_layer_idx + 1)

    def __str__(self) -> str:
        start, end, ratio = (
            shown(value, 40) for value in (self.start_layer_idx, self.end_layer_idx, self.selection_ratio)
        )
        return f"route {start}..{end} at {ratio}"

    @classmethod
    def from_config(cls, config: object, name: str) -> "Route":
        """A route from its mapping; `name` is what messages call it ("routes[1]")."""
        if not isinstance(config, Mapping):
            raise ConfigError(f"{name} is {shown(config)}; it must be a mapping with {', '.join(ROUTE_KEYS)}.")
        check_keys(config, ROUTE_KEYS, name)
        missing = [key for key in ROUTE_KEYS if key not in config]
        if missing:
            raise ConfigError(f"{name} lacks {', '.join(missing)}. Each route needs {', '.join(ROUTE_KEYS)}.")
        try:
            return cls(**config)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None

    def resolve(self, depth: int) -> "Route":
        """The same route with non-negative indices, checked against a model of `depth` layers."""
        start, end = (
            _resolve_index(value, name, depth, self)
            for value, name in ((self.start_layer_idx, "start_layer_idx"), (self.end_layer_idx, "end_layer_idx"))
        )
        if start > end:
            raise ConfigError(
                f"{self} starts after it ends in a model of {depth} layers: "
                f"it covers layers {start}..{end}. Lower start_layer_idx or raise end_layer_idx."
            )
        return Route(selection_ratio=self.selection_ratio, start_layer_idx=start, end_layer_idx=end)

    def to_config(self) -> dict[str, float | int]:
        """The config form; `Route.from_config` reads it back."""
        return {key: getattr(self, key) for key in ROUTE_KEYS}


def _resolve_index(index: int, name: str, depth: int, route: Route) -> int:
    if not -depth <= index < depth:
        raise ConfigError(
            f"{name} {index} of {route} is outside a model of {depth} layers; "
            f"allowed is {-depth}..{depth - 1} (-1 is the last layer)."
        )
    return index % depth
