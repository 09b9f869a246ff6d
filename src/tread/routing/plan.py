"""A plan: every `tread_config` setting, read and validated once.

`RoutePlan.from_config` takes what users write: a mapping, a JSON string, the path of a JSON or YAML file, or just the
name of a preset; with or without the outer key `tread_config`, with `routes` or a `preset`. `plan.resolve(depth)` gives
the plan of one model: routes sorted, disjoint and in range. A route either runs as written or is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tread.config.documents import is_file, parse_json, read_document, settled
from tread.errors import ConfigError, check_choice, check_fraction, check_int, check_keys, nearest, shown
from tread.routing.route import Route
from tread.routing.schedule import Schedule

#            name          ratio  start  end
_PRESETS = {
    "balanced":  (0.5, 2, -2),
    "max-speed": (0.7, 1, -1),
    "high-res":  (0.6, 2, -3),
    "lora":      (0.4, 3, -4),
    "masked":    (0.7, 2, -2),
    "paper":     (0.5, 2, -4),
    "video":     (0.5, 2, -3),
}  # fmt: skip
PRESETS = {
    name: Route(selection_ratio=ratio, start_layer_idx=start, end_layer_idx=end)
    for name, (ratio, start, end) in _PRESETS.items()
}
PLAN_KEYS = ("routes", "preset", "selector", "importance", "seed", "schedule", "reference_tokens")
SELECTORS = ("random", "l1")
REFERENCE_TOKENS = ("keep", "route")
DEFAULT_SEED = 42
DEFAULT_IMPORTANCE = {"random": 0.0, "l1": 0.5}
NO_ROUTES = (
    "TREAD training requires you to configure the routes: give `routes`, a list of "
    '{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -4}, or a `preset`: '
    f"{', '.join(PRESETS)}."
)


@dataclass(frozen=True, kw_only=True)
class RoutePlan:
    """Routes and how tokens are selected for them."""

    routes: tuple[Route, ...]
    selector: str = "random"
    """One of SELECTORS."""
    importance: float = 0.0
    """Weight of a token's L1 rank against chance in its score, 0 to 1; above 0 only with `l1`."""
    seed: int = DEFAULT_SEED
    schedule: Schedule | None = None
    """How the ratios change over training; None: they are constant."""
    reference_tokens: str = "keep"
    """keep: tokens of reference images are never dropped; route: they are routed like the target's."""
    depth: int | None = None
    """Layers of the model that the plan is resolved for; None: not resolved."""

    def __post_init__(self) -> None:
        if not self.routes:
            raise ConfigError(NO_ROUTES)
        check_choice(self.selector, "selector", SELECTORS)
        check_fraction(self.importance, "importance")
        if self.selector == "random" and self.importance:
            raise ConfigError(
                f"importance is {self.importance}, but the selector is 'random', which never looks at the tokens. "
                "Set selector to 'l1', or leave importance out."
            )
        check_int(self.seed, "seed", 0)
        check_choice(self.reference_tokens, "reference_tokens", REFERENCE_TOKENS)

    @classmethod
    def from_config(cls, config: "RoutePlan | Mapping[str, Any] | str | Path") -> "RoutePlan":
        """A plan from a mapping, a JSON string, a path or the name of a preset.

        >>> RoutePlan.from_config("paper").resolve(12).routes[0].end_layer_idx
        8
        """
        if isinstance(config, RoutePlan):
            return config
        config = tread_mapping(config)
        config = {key: value for key, value in config.items() if value is not None}  # null in YAML: not set
        selector = check_choice(config.get("selector", "random"), "selector", SELECTORS)
        schedule = config.get("schedule")
        return cls(
            routes=_routes(config),
            selector=selector,
            importance=config.get("importance", DEFAULT_IMPORTANCE[selector]),
            seed=config.get("seed", DEFAULT_SEED),
            schedule=None if schedule is None else Schedule.from_config(schedule),
            reference_tokens=config.get("reference_tokens", "keep"),
        )

    def resolve(self, depth: int) -> "RoutePlan":
        """The plan of a model with `depth` layers: indices non-negative, routes sorted and disjoint."""
        check_int(depth, "depth", 1)
        resolved = sorted(((route.resolve(depth), route) for route in self.routes), key=lambda r: r[0].start_layer_idx)
        for (first, written), (second, written_next) in pairwise(resolved):
            if second.start_layer_idx <= first.end_layer_idx:
                raise ConfigError(
                    f"{written} and {written_next} overlap in a model of {depth} layers (layers "
                    f"{first.start_layer_idx}..{first.end_layer_idx} and {second.start_layer_idx}.."
                    f"{second.end_layer_idx}). Let the second start at layer {first.end_layer_idx + 1} or later."
                )
        return replace(self, routes=tuple(route for route, _ in resolved), depth=depth)

    def with_total_steps(self, total_steps: int) -> "RoutePlan":
        """The plan with the schedule's `total_steps` filled in if it is not set."""
        if self.schedule is None or self.schedule.total_steps is not None:
            return self
        return replace(self, schedule=replace(self.schedule, total_steps=total_steps))

    def to_config(self) -> dict[str, Any]:
        """The JSON form; `RoutePlan.from_config` reads it back to an equal plan."""
        config: dict[str, Any] = {"routes": [route.to_config() for route in self.routes], "selector": self.selector}
        if self.selector != "random":
            config["importance"] = self.importance
        config["seed"] = self.seed
        if self.schedule is not None:
            config["schedule"] = self.schedule.to_config()
        config["reference_tokens"] = self.reference_tokens
        return config


def tread_mapping(config: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """The mapping inside `tread_config`, its keys checked and its values not."""
    mapping = read_mapping(config)
    if "tread_config" in mapping:
        check_keys(mapping, ["tread_config"], "around tread_config")
        mapping = mapping["tread_config"]
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"tread_config is {shown(mapping)}; it must be a mapping with `routes` or `preset`.")
    if "selection_ratio" in mapping:
        raise ConfigError(
            "tread_config has selection_ratio itself; it belongs to a route: give `routes`, a list of them."
        )
    check_keys(mapping, PLAN_KEYS, "tread_config")
    return mapping


def read_mapping(config: object, name: str = "tread_config") -> Mapping[str, Any]:
    """A mapping from a mapping, a preset's name, a JSON string or a file; `name` is that of the setting."""
    if isinstance(config, str) and config in PRESETS:
        return {"preset": config}
    if isinstance(config, str) and config.lstrip().startswith("{"):
        config = parse_json(config, name)
    elif isinstance(config, str | Path):
        if not is_file(config):
            close = nearest(config, PRESETS)
            raise ConfigError(
                f"{name} is {shown(str(config))}: no preset ({', '.join(PRESETS)}) and no such file{close}"
            )
        config = settled(read_document(Path(config), name))
    if not isinstance(config, Mapping):
        raise ConfigError(f"{name} is {shown(config)}; it must be a mapping, a preset, a JSON string or a path.")
    return config


def _routes(config: Mapping[str, Any]) -> tuple[Route, ...]:
    routes, preset = config.get("routes"), config.get("preset")
    if routes is not None and preset is not None:
        raise ConfigError(f"tread_config has both routes and preset {shown(preset)}; keep one of them.")
    if preset is not None:
        return (PRESETS[check_choice(preset, "preset", PRESETS)],)
    if not routes:
        raise ConfigError(NO_ROUTES)
    if isinstance(routes, str | Mapping) or not hasattr(routes, "__iter__"):
        raise ConfigError(f"routes is {shown(routes)}; it must be a list of routes.")
    return tuple(Route.from_config(route, f"routes[{i}]") for i, route in enumerate(routes))
