"""The family of a model, or the reason why it has none.

Class names of diffusers are unique. Elsewhere names such as `DiT` or `Flux` are common: several families may name one
class, and the model's structure decides.
"""

import operator
from dataclasses import replace

from torch import nn

from tread.attach.checks import check_family, located
from tread.attach.families import ELSEWHERE, FAMILIES, REFUSED
from tread.attach.family import Family
from tread.errors import ConfigError, nearest

HOW_TO = "docs/own-model.md says how to declare one with tread.Family."
_OWN = "tread.models.dit"


def family_for(model: nn.Module, family: Family | None = None) -> Family:
    """The given family or that of the model's class, checked, with its rotary functions resolved."""
    family = family_of(model) if family is None else family
    check_family(model, family)
    return replace(family, rotary=tuple(located(rotary, model) for rotary in family.rotary))


def family_of(model: nn.Module) -> Family:
    """The family of a model by the class names in its MRO; outside diffusers by its structure too."""
    names = [cls.__name__ for cls in type(model).__mro__]
    known = {name: family for family in FAMILIES for name in family.models}
    if any(cls.__module__ == _OWN for cls in type(model).__mro__):
        raise ConfigError("tread's own DiT routes itself: call model.route(config) instead of tread.attach.")
    differs: dict[str, str] = {}
    for name in names:
        if name in known:
            return known[name]
        if name in REFUSED:
            raise ConfigError(f"{name} cannot be routed: {REFUSED[name]}")
        for family in (family for family in ELSEWHERE if name in family.models):
            try:
                check_family(model, family)
            except ConfigError as error:
                differs[name] = str(error)  # the last one, which requires least
            else:
                return family
    for name, reason in differs.items():
        raise ConfigError(
            f"there is no family for {names[0]}: it is not the {name} that tread knows. {reason} {HOW_TO}"
        )
    raise ConfigError(f"there is no family for {names[0]}{nearest(names[0], known)} {HOW_TO}")


def layers_of(model: nn.Module) -> list[nn.Module]:
    """A model's layers in execution order, as routes count them."""
    return [layer for stack in family_of(model).stacks for layer in operator.attrgetter(stack.name)(model)]
