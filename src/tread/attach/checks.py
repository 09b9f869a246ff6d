"""Checks of a family against a model when it is attached.

- Every name in a family is looked up: class, parts, stacks, arguments of layers and of the model, rotary functions. A
  misspelt one would otherwise be ignored silently, or fail in the middle of a forward.
- Wrappers around layers are unwrapped first. A forward with **kwargs accepts any name, except in diffusers, whose
  layers ignore what their **kwargs catch: there a renamed argument would go unrouted.
"""

import importlib
import inspect
import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from tread.attach.family import Family, Rotary, Side, Stack
from tread.attach.wrappers import naming_forward, unwrapped
from tread.errors import ConfigError, nearest


def check_family(model: nn.Module, family: Family) -> None:
    """Raise a ConfigError if `family` does not describe `model`."""
    bases = [cls.__name__ for cls in type(model).__mro__ if issubclass(cls, nn.Module) and cls is not nn.Module]
    if not set(bases) & set(family.models):
        raise ConfigError(
            f"this family is for {_listed(family.models)}, and the model is a {' < '.join(bases)}. "
            f"Declare it with Family(models=({bases[0]!r},), ...)."
        )
    name = bases[0]
    for part in family.parts:
        if not _has(model, part):
            raise ConfigError(f"{name} has no {part!r}, which a model of this family has.")
    for stack in family.stacks:
        _check_stack(model, name, stack)
    if not family.stacks:
        raise ConfigError(f"the family of {name} has no stacks: give at least one tread.Stack(name=...).")
    _check_arguments(model, f"Family(inputs={family.inputs!r})", family.inputs, f"{name}.forward")
    _check_arguments(model, f"Family(residuals={family.residuals!r})", family.residuals, f"{name}.forward")
    if family.references is not None and family.tokens is None:
        raise ConfigError(f"the family of {name} has references but no tokens: give Family(tokens=...) too.")
    for rotary in family.rotary:
        _check_rotary(name, located(rotary, model))


def located(rotary: Rotary, model: nn.Module) -> Rotary:
    """The rotary function with its full path, resolved through the submodule `of` if the family names one."""
    if rotary.of is None:
        return rotary
    if not _has(model, rotary.of):
        raise ConfigError(f"Rotary(of={rotary.of!r}): {type(model).__name__} has no such submodule.")
    forward: Any = inspect.unwrap(type(operator.attrgetter(rotary.of)(model)).forward)
    return replace(rotary, function=f"{forward.__module__}.{rotary.function}", of=None)


def _check_stack(model: nn.Module, name: str, stack: Stack) -> None:
    given = f"Stack(name={stack.name!r})"
    if not _has(model, stack.name):
        lists = _lists(model)
        raise ConfigError(
            f"{given}: {name} has no such attribute{nearest(stack.name, lists)} Its lists of layers: {_listed(lists)}."
        )
    attribute = operator.attrgetter(stack.name)(model)
    layers = list(attribute) if isinstance(attribute, Iterable) else []
    if not layers or not all(isinstance(layer, nn.Module) for layer in layers):
        empty = isinstance(attribute, nn.ModuleList | list | tuple) and not layers
        what = "an empty list" if empty else f"a {type(attribute).__name__}"
        raise ConfigError(
            f"{given}: {name}.{stack.name} is {what}; it must be a list of layers, such as nn.ModuleList. "
            f"The model's lists of layers: {_listed(_lists(model))}."
        )
    if stack.dim not in (0, 1):
        raise ConfigError(f"{given} has dim={stack.dim}; a stream's token axis is 1, or 0 before the batch.")
    if stack.returns is not None and stack.returns < 0:
        raise ConfigError(
            f"{given} has returns={stack.returns}; count the stream's index in what a layer returns from 0."
        )
    for index, layer in enumerate(layers):
        owner = f"layer {index} ({type(unwrapped(layer)).__name__})"
        _check_arguments(layer, f"Stack(stream={stack.stream!r})", (stack.stream,), owner)
    for side in stack.sides:
        _check_side(layers, stack, side)
    for count in stack.counts:
        _check_taken(layers, stack, f"Stack(counts={stack.counts!r})", count)


def _check_side(layers: list[nn.Module], stack: Stack, side: Side) -> None:
    given = f"Side(name={side.name!r})"
    argument, _, entry = side.name.partition(".")
    if side.dim < 0:
        raise ConfigError(f"{given} has dim={side.dim}; count the token axis from the front, from 0.")
    if side.full and (side.dim == 0 or entry):
        raise ConfigError(
            f"{given} is full, so dim={side.dim} must be the token axis of what is rotated, 1 or more, and its name "
            "that of an argument."
        )
    if not side.optional:
        _check_taken(layers, stack, given, argument)
    if side.after is not None:
        _check_taken(layers, stack, f"Side(after={side.after!r})", side.after)


def _check_taken(layers: list[nn.Module], stack: Stack, given: str, argument: str) -> None:
    """Check that at least one layer of the stack takes `argument`."""
    known: dict[str, None] = {}
    for layer in layers:
        names, any_name = argument_names(layer)
        if any_name or argument in names:
            return
        known.update(dict.fromkeys(names))
    raise ConfigError(
        f"{given}: no layer in {stack.name!r} takes {argument!r}{nearest(argument, known)} They take: {_listed(known)}."
    )


def _check_arguments(module: nn.Module, given: str, arguments: Iterable[str], owner: str) -> None:
    """Check that `module`, which messages call `owner`, takes every one of `arguments`."""
    names, any_name = argument_names(module)
    for argument in arguments:
        if not any_name and argument not in names:
            raise ConfigError(
                f"{given}: {owner} takes no {argument!r}{nearest(argument, names)} It takes: {_listed(names)}."
            )


def _check_rotary(name: str, rotary: Rotary) -> None:
    module, _, function = rotary.function.rpartition(".")
    try:
        rotate = getattr(importlib.import_module(module), function, None)
    except (ImportError, ValueError):  # no such module, or no module in the path
        rotate = None
    if not callable(rotate):
        raise ConfigError(
            f"Rotary(function={rotary.function!r}): there is no such function, so the layers of {name} rotate by "
            "another. Name the module that looks it up, and the function."
        )


def argument_names(module: nn.Module) -> tuple[list[str], bool]:
    """The names of a module's arguments, and whether **kwargs accept and use any other name."""
    forward = naming_forward(unwrapped(module))
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind not in variable]
    takes_kwargs = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    return names, takes_kwargs and not forward.__module__.startswith("diffusers.")


def _has(model: nn.Module, path: str) -> bool:
    value: Any = model
    for name in path.split("."):
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True


def _lists(model: nn.Module) -> list[str]:
    """The paths of the model's module lists that are not inside a layer."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and not any(part.isdigit() for part in name.split("."))
    ]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
