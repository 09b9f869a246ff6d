"""Which family a model belongs to, or why it has none."""

import operator

from torch import nn

from tread.attach.families import FAMILIES, REFUSED
from tread.attach.family import Family
from tread.routing.errors import ConfigError, nearest

HOW_TO = "docs/families.md says how to declare one with tread.Family."


def family_of(model: nn.Module) -> Family:
    """The family of a model, found through its MRO."""
    names = [cls.__name__ for cls in type(model).__mro__]
    known = {name: family for family in FAMILIES for name in family.models}
    for name in names:
        if name in known:
            return known[name]
        if name in REFUSED:
            raise ConfigError(f"{name} cannot be routed: {REFUSED[name]}")
    raise ConfigError(f"there is no family for {names[0]}{nearest(names[0], known)} {HOW_TO}")


def layers_of(model: nn.Module) -> list[nn.Module]:
    """A model's layers in execution order, as routes count them."""
    return [layer for stack in family_of(model).stacks for layer in operator.attrgetter(stack.name)(model)]
