"""The fields of a settings class or function: type, default and documentation of each, in one list.

- A dataclass documents a field by the text under it; a function or another class by `Annotated[type, "text"]` in its
  signature. Help texts, reference pages and the YAML that users edit are written from here.
"""

import ast
import dataclasses
import inspect
import textwrap
import types
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

MISSING = dataclasses.MISSING
"""The default of a field that must be given."""
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    types.NoneType: "null",
}


@dataclasses.dataclass(frozen=True)
class Field:
    """One setting."""

    name: str
    hint: Any
    default: Any
    doc: str


def fields_of(owner: Callable[..., Any]) -> dict[str, Field]:
    """The settings of a dataclass, or the parameters of a function or class, by name.

    >>> def draw(*, size: Annotated[int, "pixels"] = 64) -> None: ...
    >>> fields_of(draw)
    {'size': Field(name='size', hint=<class 'int'>, default=64, doc='pixels')}
    """
    is_class = inspect.isclass(owner)
    docs = _attribute_docs(owner) if dataclasses.is_dataclass(owner) and is_class else {}
    hints = get_type_hints(owner.__init__ if is_class else owner, include_extras=True)
    made = {}
    for name, parameter in inspect.signature(owner).parameters.items():  # pyright: ignore[reportArgumentType]
        hint, doc = hints[name], docs.get(name, "")
        if get_origin(hint) is Annotated:
            hint, doc = hint.__origin__, hint.__metadata__[0]
        default = MISSING if parameter.default is parameter.empty else parameter.default
        if default is _FACTORY:
            default = next(field.default_factory for field in dataclasses.fields(owner) if field.name == name)()  # pyright: ignore
        made[name] = Field(name, hint, default, doc)
    return made


_FACTORY = dataclasses._HAS_DEFAULT_FACTORY  # pyright: ignore  (a signature's placeholder for a default_factory)


@cache
def _attribute_docs(owner: type) -> dict[str, str]:
    """The text under each field of a dataclass and of the dataclasses it extends."""
    docs: dict[str, str] = {}
    for cls in reversed(owner.__mro__):
        if not dataclasses.is_dataclass(cls):
            continue
        try:
            source = inspect.getsource(cls)
        except OSError:  # a class defined at a prompt has no source file
            continue
        tree = ast.parse(textwrap.dedent(source)).body[0]
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                docs[field.target.id] = inspect.cleandoc(ast.literal_eval(text.value))
    return docs


def options_of(hint: Any) -> tuple[Any, ...]:
    """The types that a union joins, or the type itself.

    >>> options_of(int | None)
    (<class 'int'>, <class 'NoneType'>)
    """
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def describe(hint: Any) -> str:
    """A type in words.

    >>> describe(int | None)
    'a whole number or null'
    """
    origin = get_origin(hint)
    if origin is Literal:
        choices = [repr(choice) for choice in get_args(hint)]
        return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)
    if len(options := options_of(hint)) > 1:
        return " or ".join(dict.fromkeys(describe(option) for option in options))
    if origin is tuple:
        count = "" if get_args(hint)[-1] is ... else f" of {len(get_args(hint))}"
        return f"a list{count} ({describe(get_args(hint)[0])} each)"
    if origin is dict or dataclasses.is_dataclass(hint):
        return "a mapping of settings"
    return _WORDS[hint]
