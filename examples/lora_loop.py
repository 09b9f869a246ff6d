"""A complete LoRA loop on a stock FLUX transformer, with routing: the two lines that say `tread`.

    python examples/lora_loop.py                              # a tiny model with random weights, made-up latents
    accelerate launch examples/lora_loop.py --model FOLDER --data LATENTS --steps 2000

FOLDER is a diffusers model (its `transformer` is used); LATENTS holds safetensors files, one per image, with `latents`
(16, H, W), `prompt_embeds` (T, 4096) and `pooled` (768,). The adapter loads with `FluxPipeline.load_lora_weights`.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

import tread

TINY = {"in_channels": 16, "num_layers": 4, "num_single_layers": 4, "attention_head_dim": 16, "num_attention_heads": 2}
TINY |= {"joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 6, 6), "guidance_embeds": True}
ROUTES = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -2}]}


def samples(folder: Path | None, batch: int) -> Iterator[dict[str, Tensor]]:
    """Batches without end, from files or made up."""
    generator = torch.Generator().manual_seed(0)
    files = sorted(folder.glob("*.safetensors")) if folder else []
    shapes = {"latents": (4, 16, 24), "prompt_embeds": (8, 32), "pooled": (32,)}
    made_up = [{name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()} for _ in range(4)]
    while True:
        for chosen in torch.randperm(len(files) or 4, generator=generator).split(batch):
            found = [load_file(files[i]) if files else made_up[i] for i in chosen.tolist()]
            yield {name: torch.stack([sample[name] for sample in found]) for name in shapes}


def flow_loss(model: torch.nn.Module, batch: dict[str, Tensor], noise: Tensor, time: Tensor) -> Tensor:
    latents, mix = batch["latents"], time.view(-1, 1, 1, 1)
    noisy = (1 - mix) * latents + mix * noise
    rows, columns = latents.shape[2] // 2, latents.shape[3] // 2
    ids = torch.zeros(rows, columns, 3, device=latents.device)
    ids[..., 1] += torch.arange(rows, device=latents.device)[:, None]
    ids[..., 2] += torch.arange(columns, device=latents.device)
    output = model(
        hidden_states=F.pixel_unshuffle(noisy, 2).flatten(2).transpose(1, 2),  # (B, S, 4C)
        encoder_hidden_states=batch["prompt_embeds"],
        pooled_projections=batch["pooled"],
        timestep=time,
        guidance=torch.ones_like(time),
        img_ids=ids.view(-1, 3),
        txt_ids=torch.zeros(batch["prompt_embeds"].shape[1], 3, device=latents.device),
        return_dict=False,
    )[0]
    return F.mse_loss(output, F.pixel_unshuffle(noise - latents, 2).flatten(2).transpose(1, 2))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="LoRA on FLUX with routing.")
    parser.add_argument("--model", help="a diffusers model with a FLUX transformer (default: a tiny one)")
    parser.add_argument("--data", type=Path, help="a folder of safetensors files (default: made-up latents)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("runs/lora-loop"))
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
    if options.model:
        model = FluxTransformer2DModel.from_pretrained(
            options.model, subfolder="transformer", torch_dtype=torch.bfloat16
        )
        model.enable_gradient_checkpointing()
    else:
        model = FluxTransformer2DModel(**TINY)
    model.requires_grad_(False)
    model.add_adapter(
        LoraConfig(r=options.rank, lora_alpha=options.rank, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
    )
    handle = tread.attach(model, ROUTES)  # routing, from the next training forward on
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    wrapped, optimizer = accelerator.prepare(model.train(), torch.optim.AdamW(trainable, lr=1e-3))

    batches = samples(options.data, options.batch_size)
    batch = {name: value.to(accelerator.device) for name, value in next(batches).items()}
    fixed = torch.randn_like(batch["latents"]), torch.full((len(batch["latents"]),), 0.5, device=accelerator.device)
    with torch.no_grad():
        print(f"dense loss before: {flow_loss(model, batch, *fixed).item():.4f}")
    for step in range(options.steps):
        handle.set_step(step)  # so that a resumed run drops the same tokens
        now = {name: value.to(accelerator.device) for name, value in next(batches).items()}
        noise, time = torch.randn_like(now["latents"]), torch.rand(len(now["latents"]), device=accelerator.device)
        loss = flow_loss(wrapped, now, noise, time)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():  # validation runs dense by itself
        print(f"dense loss after:  {flow_loss(model, batch, *fixed).item():.4f}")
    if accelerator.is_main_process:
        FluxPipeline.save_lora_weights(options.out, transformer_lora_layers=get_peft_model_state_dict(model))
        print(f"adapter: {options.out}/pytorch_lora_weights.safetensors")


if __name__ == "__main__":
    main()
