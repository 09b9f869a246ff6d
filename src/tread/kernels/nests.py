"""Nests of tuples, lists and dicts, as layers take and return them: the tensors in one, and the nest built again."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

Whole = Callable[[Sequence[Tensor]], Any]
"""Builds a nest from its tensors."""
_TENSOR = object()


def taken_apart(nest: Any) -> tuple[list[Tensor], Whole]:
    """The tensors in a nest, and a function that builds it again with other tensors in their stead.

    >>> tensors, whole = taken_apart({"x": (Tensor([1]), 2)})
    >>> whole([2 * one for one in tensors])
    {'x': (tensor([2.]), 2)}
    """
    leaves, tree = tree_flatten(nest)
    others = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def whole(tensors: Sequence[Tensor]) -> Any:
        given = iter(tensors)
        return tree_unflatten([next(given) if other is _TENSOR else other for other in others], tree)

    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], whole
