"""The family of a model, or the reason why it has none.

- Class names of diffusers are unique. Elsewhere names such as `DiT` or `Flux` are common: several families may name one
  class, and the model's structure decides.
- Every family is checked against its model. A stock class that differs from its family mostly comes from another
  release of diffusers, so the error names the supported releases and the installed one.
"""

from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

from torch import nn

from tread.attach.checks import check_family, located
from tread.attach.families import ELSEWHERE, FAMILIES, REFUSED
from tread.attach.family import Family
from tread.errors import ConfigError, nearest

HOW_TO = "docs/own-model.md says how to declare one with tread.Family."
DIFFUSERS = ">=0.42,<0.43"
"""The releases whose classes the stock families describe, as pyproject.toml has them."""
_OWN = "tread.models.dit"
"""The module of tread's own DiT, which routes itself."""


def family_for(model: nn.Module, family: Family | None = None) -> Family:
    """The given family or that of the model's class, checked, with its rotary functions resolved."""
    if family is None:
        family = family_of(model)
    else:
        check_family(model, family)
    return replace(family, rotary=tuple(located(rotary, model) for rotary in family.rotary))


def family_of(model: nn.Module) -> Family:
    """The family of a model, checked, by the class names in its MRO; outside diffusers by its structure too."""
    names = [cls.__name__ for cls in type(model).__mro__]
    known = {name: family for family in FAMILIES for name in family.models}
    if any(cls.__module__ == _OWN for cls in type(model).__mro__):
        raise ConfigError("tread's own DiT routes itself: call model.route(config) instead of tread.attach.")
    differs: dict[str, str] = {}
    for name in names:
        if name in known:
            _check_stock(model, name, known[name])
            return known[name]
        if name in REFUSED:
            raise ConfigError(f"{name} cannot be routed: {REFUSED[name]}")
        for family in (family for family in ELSEWHERE if name in family.models):
            try:
                check_family(model, family)
            except ConfigError as error:
                differs[name] = str(error)  # the last family's error counts: it requires least
            else:
                return family
    if differs:
        name, reason = next(iter(differs.items()))
        raise ConfigError(
            f"there is no family for {names[0]}: it is not the {name} that tread knows. {reason} {HOW_TO}"
        )
    if "DataParallel" in names:
        raise ConfigError("nn.DataParallel runs one model in several threads: use DistributedDataParallel.")
    for path, part in model.named_modules():
        if found := next((cls.__name__ for cls in type(part).__mro__ if cls.__name__ in known), None):
            raise ConfigError(
                f"there is no family for {names[0]}, but there is for its part {path!r}, a {found}: attach that, "
                f"or declare {names[0]} with tread.Family (docs/own-model.md)."
            )
    raise ConfigError(f"there is no family for {names[0]}{nearest(names[0], known)} {HOW_TO}")


def _check_stock(model: nn.Module, name: str, family: Family) -> None:
    """Raise a ConfigError that names the class and the releases of diffusers if `family` does not describe `model`."""
    try:
        check_family(model, family)
    except ConfigError as error:
        try:
            installed = version("diffusers")
        except PackageNotFoundError:  # a copy of the class in a user's code
            installed = "none"
        raise ConfigError(
            f"the family of {name} does not fit this model. {error} The family is for diffusers {DIFFUSERS}, and "
            f"{installed} is installed. If you changed the model, {HOW_TO}"
        ) from None


def layers_of(model: nn.Module) -> list[nn.Module]:
    """A model's layers in execution order, as routes count them."""
    return [layer for stack in family_of(model).stacks for layer in stack.layers(model)]
