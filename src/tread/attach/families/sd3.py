"""Stable Diffusion 3 and 3.5."""

from torch import nn

from tread.attach.family import Arguments, Family, Stack, setting


def _refuse(model: nn.Module, arguments: Arguments) -> str | None:
    """Without the last layer, an open window would never close."""
    last = setting("config.num_layers")(model) - 1
    if last in (arguments.get("skip_layers") or ()):
        return "skip_layers names the last layer, at which every window must have ended."
    return None


SD3 = Family(
    models=("SD3Transformer2DModel",),
    stacks=(Stack(name="transformer_blocks", returns=1),),
    residuals=("block_controlnet_hidden_states",),
    refuse=_refuse,
    notes="skip_layers leaves the routes where they are; it may not name the last layer.",
)
