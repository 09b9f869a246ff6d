"""Merge an adapter into the weights of its base: the result is a stock model with the same output.

- The sum of a weight and its float32 update is rounded once, to the dtype of the base. Linears are merged one by one,
  so that no second copy of the model is needed.
- Peft merges LoRA, DoRA and LoKr. A lycoris adapter is measured: its linears are applied to the identity.
"""

from typing import Any

import torch
from torch import nn

from tread.finetune.model.adapters import ADAPTER, NETWORK


def merge_adapter(model: nn.Module) -> None:
    """Add the update of the model's adapter to its weights, and remove the adapter."""
    network: Any = getattr(model, NETWORK, None)
    if network is not None:
        _merge_lycoris(model, network)
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in list(model.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge(adapter_names=[ADAPTER])
            model.set_submodule(name, layer.get_base_layer())
    for attribute in ("peft_config", "_hf_peft_config_loaded"):
        if attribute in model.__dict__:
            delattr(model, attribute)


@torch.no_grad()
def _merge_lycoris(model: nn.Module, network: Any) -> None:
    """Merge by applying each linear to the identity matrix: lycoris 4.1's own `merge_to` scales LoHa twice."""
    model.eval()  # turns dropout off
    for lora in network.loras:
        base: Any = lora.org_module[0]
        dtype = base.weight.dtype
        base.float()
        bias = base.forward(base.weight.new_zeros(1, base.in_features))  # (1, N)
        rows = base.forward(torch.eye(base.in_features, device=base.weight.device))  # (K, N)
        lora.restore()  # puts the stock forward back
        base.weight.copy_((rows - bias).T)
        if base.bias is not None:
            base.bias.copy_(bias[0])
        base.to(dtype)
    delattr(model, NETWORK)
