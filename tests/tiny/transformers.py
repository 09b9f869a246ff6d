"""Two tiny stock transformers and a call of each: one that knows adapters (FLUX) and one that does not (PixArt)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.tiny.case import tiny


def flux() -> Any:
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

    torch.manual_seed(0)
    sizes = {"in_channels": 8, "num_layers": 2, "attention_head_dim": 32, "axes_dims_rope": (8, 12, 12)}
    texts = {"joint_attention_dim": 64, "pooled_projection_dim": 32}
    return tiny(FluxTransformer2DModel, **sizes, **texts, guidance_embeds=True)()


def call_flux(model: nn.Module, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(1)
    ids = torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0)).to(device)
    return model(
        hidden_states=torch.randn(2, 16, 8, generator=generator).to(device, dtype),
        encoder_hidden_states=torch.randn(2, 5, 64, generator=generator).to(device, dtype),
        pooled_projections=torch.randn(2, 32, generator=generator).to(device, dtype),
        timestep=torch.tensor([0.2, 0.7]).to(device, dtype),
        guidance=torch.full((2,), 3.5).to(device, dtype),
        img_ids=ids,
        txt_ids=torch.zeros(5, 3, device=device),
        return_dict=False,
    )[0]


def pixart() -> Any:
    from diffusers.models.transformers.pixart_transformer_2d import PixArtTransformer2DModel

    torch.manual_seed(0)
    sizes = {"attention_head_dim": 32, "num_layers": 2, "out_channels": 8, "sample_size": 8}
    texts = {"cross_attention_dim": 64, "caption_channels": 16}
    model = tiny(PixArtTransformer2DModel, **sizes, **texts, use_additional_conditions=False)()
    return model.requires_grad_(True)


def call_pixart(model: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return model(
        hidden_states=torch.randn(2, 4, 8, 8, generator=generator).to(dtype),
        encoder_hidden_states=torch.randn(2, 5, 16, generator=generator).to(dtype),
        timestep=torch.tensor([20, 700]),
        added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        return_dict=False,
    )[0]


STOCK: dict[str, tuple[Callable[[], Any], Callable[..., Tensor]]] = {
    "flux": (flux, call_flux),
    "pixart": (pixart, call_pixart),
}
TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
