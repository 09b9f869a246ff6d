"""Slots of device memory that offloaded layers are copied into, ahead of their use and by turns.

- A visit is one use of a layer: in a forward, in a backward, or without gradients. The order of visits is learned from
  the last steps, so several stacks, validation and two models need not declare one. The first step fetches on demand.
- Copies run in a stream of their own. The computation waits for the copy of its layer, and a copy for the end of the
  computation that used its slot; the host waits for neither. On a CPU copies are plain.
- A layer that is still in a slot is not copied again: backward begins with the last layers of forward, and the next
  forward with the first ones.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from tread.kernels.offload.host import HostLayer

SLOTS = 2
"""One layer computes while another is copied."""
Pass = Literal["forward", "backward", "inference"]
Visit = tuple[Pass, HostLayer]


class Slot:
    """Device memory for one layer."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.block = torch.empty(size, dtype=torch.uint8, device=device)
        self.holds: HostLayer | None = None
        self.busy = False
        """Whether a layer is computing with it."""
        self.last = 0
        """Number of the last visit that used it."""
        self.copied: torch.Event | None = None
        """Recorded after the last copy."""
        # kernels of the current stream may still read memory that torch hands out
        self.used: torch.Event | None = (
            torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        )
        self._views: dict[HostLayer, list[Tensor]] = {}

    def views(self, host: HostLayer) -> list[Tensor]:
        """The tensors of a layer in this slot."""
        if host not in self._views:
            self._views[host] = host.views(self.block)
        return self._views[host]

    def forget(self, host: HostLayer) -> None:
        """Drop a layer and its views, which keep its host memory alive."""
        self._views.pop(host, None)
        self.holds = None if self.holds is host else self.holds

    def release(self) -> None:
        """End a use: the next copy waits for the work queued on the current stream so far."""
        self.busy = False
        if self.block.is_cuda:
            self.used = torch.cuda.current_stream(self.block.device).record_event()


class Ring:
    """`SLOTS` blocks of `size` bytes on a device, which layers take by turns."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.slots = [Slot(size, device) for _ in range(SLOTS)]
        self.fetches = 0
        """Copies so far."""
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._copies is not None:
            for slot in self.slots:  # freed after the last copy, should the model be dropped
                slot.block.record_stream(self._copies)
        self._next: dict[Visit, Visit] = {}
        self._last: Visit | None = None
        self._visits = 0

    @property
    def after_backward(self) -> bool:
        """Whether the last visit was in a backward."""
        return self._last is not None and self._last[0] == "backward"

    @contextmanager
    def visit(self, how: Pass, host: HostLayer) -> Iterator[None]:
        """Inside, the layer's tensors are on the device."""
        visit = how, host
        self._note(visit)
        slot = self._held(host) or self._fetch(host, [])
        slot.busy, slot.last = True, self._visits
        self._look_ahead(visit)
        if slot.copied is not None:
            torch.cuda.current_stream(slot.block.device).wait_event(slot.copied)
        host.use(slot.views(host))
        try:
            yield
        finally:
            host.park()
            slot.release()

    def wait(self) -> None:
        """Wait until no copy is under way."""
        if self._copies is not None:
            self._copies.synchronize()

    def forget(self, host: HostLayer) -> None:
        """Drop a layer from the learned order and from its slot."""
        self._next = {one: other for one, other in self._next.items() if host not in (one[1], other[1])}
        for slot in self.slots:
            slot.forget(host)
        if self._last is not None and self._last[1] is host:
            self._last = None

    def _note(self, visit: Visit) -> None:
        self._visits += 1
        if self._last is not None:
            self._next[self._last] = visit
        self._last = visit

    def _held(self, host: HostLayer) -> Slot | None:
        return next((slot for slot in self.slots if slot.holds is host), None)

    def _look_ahead(self, visit: Visit) -> None:
        """Fetch the layers of the next visits, as far as there are slots."""
        wanted: list[HostLayer] = []
        for _ in self.slots[1:]:
            if (following := self._next.get(visit)) is None:
                return
            visit = following
            wanted.append(visit[1])
            if self._held(visit[1]) is None:
                self._fetch(visit[1], wanted)

    def _fetch(self, host: HostLayer, wanted: list[HostLayer]) -> Slot:
        """Copy a layer into the slot that was used least recently and holds none of the layers that are wanted next."""
        free = [slot for slot in self.slots if not slot.busy and slot.holds not in wanted]
        slot = min(free, key=lambda slot: slot.last)
        slot.holds = host
        self.fetches += 1
        if self._copies is None:
            self.copy(slot, host)
            return slot
        assert slot.used is not None
        self._copies.wait_event(slot.used)
        with torch.cuda.stream(self._copies), torch.inference_mode(False):
            self.copy(slot, host)
            slot.copied = self._copies.record_event()
        return slot

    def copy(self, slot: Slot, host: HostLayer) -> None:
        """One layer from host memory to its slot."""
        slot.block[: host.size].copy_(host.block, non_blocking=True)
