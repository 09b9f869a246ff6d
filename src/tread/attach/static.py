"""Shapes of layers that the user compiled: the first ones get code of their own, further ones share code for any shape.

By default torch compiles the second length that it meets, the routed one, for any length, which is slower.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tread.kernels.compiling import ANY_SHAPE, raise_recompile_limit
from tread.kernels.fast import SETTINGS

STATIC_SHAPES = 12
"""Shapes of a class of layers with code of their own."""
VARIANTS = 4
"""Variants of a function for one shape: in training or not, of a stream with gradients or without."""


class StaticShapes:
    """The input shapes that a model's layers have met; `user` enters `SETTINGS`, and has to leave it."""

    def __init__(self, user: object) -> None:
        self._user, self._seen = user, defaultdict[type, set[Any]](set)

    def fix(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Mark the shapes of these arguments as static, if they are among the first of the layer's class."""
        if torch.compiler.is_compiling():
            return
        from torch._dynamo import mark_static  # takes a second to import

        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        shapes, seen = tuple(tensor.shape for tensor in tensors), self._seen[type(layer)]
        if shapes not in seen:
            if len(seen) >= STATIC_SHAPES:
                return
            SETTINGS.enter(self._user)
            seen.add(shapes)
            # past its limit torch runs eager; classes may share a function, and all code of the process this limit
            raise_recompile_limit(VARIANTS * (sum(map(len, self._seen.values())) + ANY_SHAPE))
        for tensor in tensors:
            mark_static(tensor)
