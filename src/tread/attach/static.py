"""Shapes of layers that the user compiled: the first ones get code of their own, further ones share code for any shape.

Left alone, torch would compile the second length of a stream, the routed one, for any length, which is slower.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tread.kernels.compiling import raise_recompile_limit
from tread.kernels.fast import SETTINGS

MOST = 12
"""Shapes with code of their own."""
VARIANTS = 64
"""torch's limit, past which it would run eager: two classes of layers that share a function, a stream with and without
gradients, these shapes, and code for any."""


class StaticShapes:
    """The shapes that layers of one class have met; `user` is who leaves `SETTINGS` in the end."""

    def __init__(self, user: object) -> None:
        self._user, self._seen = user, set[Any]()

    def fix(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let torch compile for the shapes of these arguments, if they are among the first."""
        if torch.compiler.is_compiling():
            return
        from torch._dynamo import mark_static  # takes a second to import

        tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        shapes = tuple(tensor.shape for tensor in tensors)
        if shapes not in self._seen:
            if len(self._seen) >= MOST:
                return
            SETTINGS.enter(self._user)
            raise_recompile_limit(VARIANTS)
            self._seen.add(shapes)
        for tensor in tensors:
            mark_static(tensor)
