"""What one forward holds: its selections, the bypass of the open window, and the side inputs that follow it.

A model's layer loop calls `enter` before each layer and `exit` after it and needs no branch of its own: a state
without routes returns everything as it came. A state is made for one forward and dies with it, so two forwards
before one backward cannot mix.
"""

from collections.abc import Callable

from torch import Tensor

from tread.routing.ops import gather, restore
from tread.routing.route import Route

Select = Callable[[int, Tensor], Tensor]


class State:
    """The routing of one forward; `select(route index, stream (B, S, D))` gives the kept indices (B, K)."""

    def __init__(self, routes: tuple[Route, ...] = (), select: Select | None = None) -> None:
        self._starts = {route.start_layer_idx: index for index, route in enumerate(routes)}
        self._routes = routes
        self._select = select
        self.selections: list[Tensor] = []
        self.selection: Tensor | None = None
        self._end = -1
        self._bypass: Tensor | None = None
        self._sides: dict[str, Tensor] = {}

    def enter(self, layer: int, x: Tensor) -> Tensor:
        """The stream layer `layer` sees: x (B, S, D), or its kept rows (B, K, D) where a route starts here."""
        index = self._starts.get(layer)
        if index is None or self._select is None:
            return x
        self.selection = self._select(index, x)  # (B, K)
        self.selections.append(self.selection)
        self._end = self._routes[index].end_layer_idx
        self._bypass = x
        return gather(x, self.selection)  # (B, K, D)

    def exit(self, layer: int, x: Tensor) -> Tensor:
        """The stream after layer `layer`: at the end of a window the kept rows return to the full sequence."""
        if self.selection is None or self._bypass is None or layer != self._end:
            return x
        x = restore(x, self.selection, self._bypass)  # (B, S, D)
        self.selection = self._bypass = None
        self._sides = {}
        return x

    def side(self, name: str, tensor: Tensor | None, dim: int = 0) -> Tensor | None:
        """The rows of a side input that belong to the tokens in the stream, gathered once per window.

        `dim` is the token axis: 0 for a table (S, ...) that all samples share, 1 for (B, S, ...). Inside a window
        both come back per sample, (B, K, ...); outside, or for None, the tensor comes back as it is.
        """
        if tensor is None or self.selection is None:
            return tensor
        if name not in self._sides:
            if dim == 0:
                rows = tensor.index_select(0, self.selection.flatten())  # (B * K, ...)
                self._sides[name] = rows.unflatten(0, self.selection.shape)  # (B, K, ...)
            else:
                self._sides[name] = gather(tensor, self.selection)  # (B, K, ...)
        return self._sides[name]
