"""A LoRA made by peft, saved by a family, loaded by the stock pipeline."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tread.finetune.family import TuneFamily


def assert_lora_loads(family: TuneFamily, pipeline: Any, folder: Path) -> None:
    """What `save_lora` wrote changes the prediction of a fresh transformer just as it did where it was made."""
    from peft import LoraConfig
    from peft.utils.save_and_load import get_peft_model_state_dict

    fresh = family.source.pipeline("transformer", "vae")
    before = predict(family, fresh.transformer)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=list(family.lora_targets))
    pipeline.transformer.add_adapter(config)
    for name, parameter in pipeline.transformer.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    layers: Any = get_peft_model_state_dict(pipeline.transformer)
    family.save_lora(folder, {"transformer": layers}, {"transformer": config.to_dict()})
    fresh.load_lora_weights(folder)
    after = predict(family, fresh.transformer)
    assert_close(after, predict(family, pipeline.transformer))
    assert (after - before).abs().max() > 1e-3


@torch.no_grad()
def predict(family: TuneFamily, model: Any) -> Tensor:
    config = family.source.config("transformer")
    channels = family.source.config("vae")["latent_channels"]
    width, pooled = config["joint_attention_dim"], config.get("pooled_projection_dim", 1)
    generator = torch.Generator().manual_seed(0)
    text = torch.randn(1, 5, width, generator=generator)
    batch = {"text.embeds": text, "text.pooled": torch.randn(1, pooled, generator=generator)}
    noisy = torch.randn(1, channels, 8, 8, generator=generator)
    return family.predict(model.eval(), noisy, torch.tensor([0.5]), batch)
