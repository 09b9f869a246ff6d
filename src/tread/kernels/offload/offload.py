"""Keep frozen layers of a model in host memory, so that it trains on a card that cannot hold it.

- The number of layers is given, or "auto": all of them at first, and from the second step on as few as the memory that
  the first step left free allows. They are spread evenly, so that the layers in between hide a copy.
- `handle.offload()` is this on an attached model; `tread finetune` uses it too (`offload`).
- What is trained stays on the device, and so do tensors that several layers share.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import torch
from torch import nn

from tread.errors import ConfigError
from tread.kernels.offload.call import OffloadedCall
from tread.kernels.offload.host import Anchored, HostLayer, frozen
from tread.kernels.offload.memory import MARGIN, peak_left, weight_bytes, would_be_free
from tread.kernels.offload.ring import Ring
from tread.words import counted

T = TypeVar("T")
Offloaded = int | Literal["auto"]
SMALL = 0.5
"""A model that takes less than this share of the free memory is left on the device by "auto"."""
DDP_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""The attribute that names the tensors DDP does not synchronise, which may be on another device."""


class Offload:
    """Keeps `number` of the layers of a model in host memory and the rest on `device`; `remove` undoes it.

    `device` computes, by default that of the model's first parameter. A model that is still on the CPU need not fit on
    the device. `margin` is the share of a GPU's memory that "auto" leaves free: for samples larger than the first ones,
    for whatever runs between steps, and for fragmentation.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        number: Offloaded,
        *,
        device: torch.device | str | None = None,
        margin: float = MARGIN,
        say: Callable[[str], None] = print,
    ) -> None:
        self.device = next(model.parameters()).device if device is None else torch.empty(0, device=device).device
        self._model, self._margin, self._say = model, margin, say
        layers = list(dict.fromkeys(layers))  # a module may be several layers
        _check(layers, number)
        self._settled = number != "auto"
        if number == "auto":
            needed = weight_bytes(model) > SMALL * would_be_free(model, self.device)
            number = len(layers) if needed else 0
        shared, chosen = _shared(model), spread(layers, number)
        hosts = [HostLayer(layer, self.device, shared) for layer in chosen]
        for layer, host in zip(chosen, hosts, strict=True):
            layer.__dict__["_apply"] = Anchored(layer, host)
        model.to(self.device)
        size = max((host.size for host in hosts), default=0)
        self.ring = Ring(size, self.device)
        self.calls = [OffloadedCall(layer, host, self) for layer, host in zip(chosen, hosts, strict=True)]
        """Calls of the layers that were offloaded at construction."""
        names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        setattr(model, DDP_IGNORED, [names[one] for host in hosts for one in host.ids])
        if not all(host.pinned for host in hosts):
            say("the system locks no more host memory, so offloaded layers are copied while the GPU waits.")
        if not self._settled and self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)  # the peak so far may include the offloaded weights
        self._tell(len(layers))

    def begin(self) -> None:
        """Called before a forward with gradients: after the first step, "auto" decides how many layers stay
        offloaded."""
        if self._settled or not self.ring.after_backward:
            return
        self._settled = True
        depth, spare = len(self.calls), peak_left(self.device, self._margin)
        sizes = [call.host.size for call in self.calls if call.host is not None]
        fewest = next(
            count
            for count in range(depth + 1)
            if sum(sizes) - sum(sizes[i] for i in spread(range(depth), count)) <= spare or count == depth
        )
        stay = set(spread(range(depth), fewest))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # else weights would fragment the cached blocks that the next step needs
        for i, call in enumerate(self.calls):
            if i not in stay:
                self._bring(call)
        self._tell(depth)

    def remove(self) -> None:
        """Move every weight back to its first device and call the layers as before. Calling it again does nothing."""
        self.ring.wait()
        for call in self.calls:
            host = call.host
            call.remove()
            if host is not None:
                host.restore()
                del call.layer.__dict__["_apply"]
        self.calls = []
        self._model.__dict__.pop(DDP_IGNORED, None)

    def _bring(self, call: OffloadedCall) -> None:
        """Move the weights of one layer to the device permanently."""
        assert call.host is not None
        self.ring.wait()
        self.ring.forget(call.host)
        call.host.bring(self.device)
        call.host = None
        del call.layer.__dict__["_apply"]

    def _tell(self, depth: int) -> None:
        sizes = [call.host.size for call in self.calls if call.host is not None]
        slots = len(self.ring.slots) * max(sizes, default=0)
        self._say(
            f"{len(sizes)} of {counted(depth, 'layer')} offloaded: {sum(sizes) / 2**30:.2f} GiB in host memory, "
            f"{slots / 2**30:.2f} GiB of slots on {self.device}."
        )


def spread(items: Sequence[T], number: int) -> list[T]:
    """`number` of the items, evenly spread, the first one among them.

    >>> spread(range(10), 4)
    [0, 2, 5, 7]
    """
    return [items[i * len(items) // number] for i in range(number)]


def _check(layers: Sequence[nn.Module], number: Offloaded) -> None:
    from torch.distributed.fsdp import FSDPModule  # takes half a second to import

    if number != "auto" and not 0 <= number <= len(layers):
        raise ConfigError(
            f"offload is {number}, but the model has {len(layers)} layers: set it to 0..{len(layers)} or 'auto'."
        )
    if any(isinstance(layer, FSDPModule) for layer in layers):
        raise ConfigError("the layers are sharded by FSDP, which moves their weights itself: leave offload out.")
    if number and not any(frozen(layer) for layer in layers):
        raise ConfigError(
            "offload keeps frozen weights in host memory, and all weights of the layers are trained: train an adapter, "
            "or leave offload out."
        )


def _shared(model: nn.Module) -> set[int]:
    """The ids of tensors that several modules of the model share."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {one for one, times in Counter(id(tensor) for _, tensor in tensors).items() if times > 1}
