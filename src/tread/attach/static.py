"""Shapes of layers that the user compiled: the first ones get code of their own, further ones share code for any shape.

By default torch compiles the second length that it meets, the routed one, for any length, which is slower.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tread.kernels.compiling import raise_recompile_limit
from tread.kernels.fast import SETTINGS

STATIC_SHAPES = 12
"""Shapes with code of their own."""
RECOMPILE_LIMIT = 64
"""Torch's recompile limit, past which it would run eager: enough for two classes of layers that share a function, a
stream with and without gradients, these shapes, and code for any shape."""


class StaticShapes:
    """The input shapes that layers of one class have met; `user` enters `SETTINGS`, and has to leave it."""

    def __init__(self, user: object) -> None:
        self._user, self._seen = user, set[Any]()

    def fix(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Mark the shapes of these arguments as static, if they are among the first."""
        if torch.compiler.is_compiling():
            return
        from torch._dynamo import mark_static  # takes a second to import

        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        shapes = tuple(tensor.shape for tensor in tensors)
        if shapes not in self._seen:
            if len(self._seen) >= STATIC_SHAPES:
                return
            SETTINGS.enter(self._user)
            raise_recompile_limit(RECOMPILE_LIMIT)
            self._seen.add(shapes)
        for tensor in tensors:
            mark_static(tensor)
