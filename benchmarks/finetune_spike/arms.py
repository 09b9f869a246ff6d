"""The table of the experiment: which runs there are, what each of them answers, and how large everything is.

- All arms of one kind start from the same weights and see the same samples, noise and times at the same steps, so the
  excess of a routed loss over the dense one at a step is routing's and nothing else's.
- Warm-up and cool-down are those that adapters get by default, so what is measured is what is shipped.
- The image has far more tokens than the text, as it has when FLUX is tuned at 1024 px: 512 px make 1,024 image tokens
  beside 64 of text, which are never dropped; captions here are a few words.
- The order is that of importance: a run that is cut short has answered the main questions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tread.finetune.settings import SCHEDULE, FinetuneConfig

WARMUP, COOLDOWN = SHIPPED = SCHEDULE.warmup_fraction, SCHEDULE.cooldown_fraction
BALANCED = (2, -2)
TEXT_WIDTH, POOLED_WIDTH, TEXT_LENGTH = 256, 32, 64
Kind = Literal["lora", "full"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One fine-tune; ratio 0 is dense."""

    name: str
    kind: Kind
    ratio: float = 0.0
    layers: tuple[int, int] = BALANCED
    schedule: tuple[float, float] = (0.0, 0.0)
    """The share of the steps over which the ratio climbs, and the share, the last ones, that run dense."""
    seed: int = 42
    routed_loss: Literal["all", "kept"] = "all"
    asks: str

    def tread_config(self, steps: int) -> dict[str, Any] | None:
        """The routing of a run of `steps` steps."""
        if not self.ratio:
            return None
        start, end = self.layers
        warmup, cooldown = self.schedule
        schedule = {"warmup_steps": round(steps * warmup), "cooldown_fraction": cooldown}
        return {
            "routes": [{"selection_ratio": self.ratio, "start_layer_idx": start, "end_layer_idx": end}],
            "schedule": schedule if warmup or cooldown else None,
        }


ARMS = (
    Arm(name="lora-dense", kind="lora", asks="what is LoRA compared with"),
    Arm(name="lora-0.5", kind="lora", ratio=0.5, asks="how high and long is the spike of LoRA"),
    Arm(name="lora-0.5-schedule", kind="lora", ratio=0.5, schedule=SHIPPED, asks="does the default schedule help"),
    Arm(name="full-dense", kind="full", asks="what are all weights compared with"),
    Arm(name="full-0.5", kind="full", ratio=0.5, asks="do all weights spike less than LoRA"),
    Arm(name="full-0.5-schedule", kind="full", ratio=0.5, schedule=SHIPPED, asks="do they need the schedule too"),
    Arm(name="lora-0.25", kind="lora", ratio=0.25, asks="is a low ratio free of the spike"),
    Arm(name="lora-0.25-schedule", kind="lora", ratio=0.25, schedule=SHIPPED, asks="does it need the schedule"),
    Arm(name="full-0.25", kind="full", ratio=0.25, asks="is a low ratio free of it with all weights"),
    Arm(name="full-0.25-schedule", kind="full", ratio=0.25, schedule=SHIPPED, asks="does it need the schedule"),
    Arm(name="lora-0.5-warmup", kind="lora", ratio=0.5, schedule=(WARMUP, 0), asks="what does the warm-up do alone"),
    Arm(name="lora-0.5-cooldown", kind="lora", ratio=0.5, schedule=(0, COOLDOWN), asks="and what the cool-down"),
    Arm(
        name="lora-0.5-long-cooldown", kind="lora", ratio=0.5, schedule=(0, 2 * COOLDOWN), asks="is a longer one better"
    ),
    Arm(
        name="lora-preset", kind="lora", ratio=0.4, layers=(3, -4), schedule=SHIPPED, asks="is a narrower window better"
    ),
    Arm(
        name="lora-0.5-kept",
        kind="lora",
        ratio=0.5,
        routed_loss="kept",
        asks="is it better to take no loss on dropped tokens",
    ),
    Arm(
        name="lora-0.5-kept-cooldown",
        kind="lora",
        ratio=0.5,
        routed_loss="kept",
        schedule=(0, COOLDOWN),
        asks="does that need a cool-down",
    ),
    Arm(name="full-0.5-kept", kind="full", ratio=0.5, routed_loss="kept", asks="and with all weights"),
    Arm(name="lora-dense-again", kind="lora", seed=43, asks="how far apart are two dense runs by chance"),
)
PICTURED = ("base", *(arm.name for arm in ARMS[:6]))
"""Whose drawings are shown."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large everything is."""

    resolution: int
    double_layers: int
    single_layers: int
    heads: int
    head_axes: tuple[int, int, int]
    """How a head's channels are split over the rotary axes: image, row, column."""
    images_per_group: int | None
    """None: all of them."""
    base_steps: int
    base_batch: int
    base_log: int
    steps: int
    batch: int
    rank: int
    validate_every: int
    validated: int
    workers: int
    solver_steps: int
    pictures: Mapping[str, int]
    """How many captions are drawn of each folder of images."""
    rates: Mapping[str, float]

    @property
    def transformer(self) -> dict[str, Any]:
        """The arguments of FluxTransformer2DModel for taef1's 16 channels and the text of `prepare`."""
        return {
            "in_channels": 64,
            "num_layers": self.double_layers,
            "num_single_layers": self.single_layers,
            "attention_head_dim": sum(self.head_axes),
            "num_attention_heads": self.heads,
            "joint_attention_dim": TEXT_WIDTH,
            "pooled_projection_dim": POOLED_WIDTH,
            "axes_dims_rope": self.head_axes,
            "guidance_embeds": False,
        }


SCALES = {
    "h200": Scale(
        resolution=512, double_layers=4, single_layers=8, heads=8, head_axes=(8, 28, 28), images_per_group=None,
        base_steps=2500, base_batch=64, base_log=20, steps=400, batch=32, rank=16, validate_every=20, validated=32,
        workers=8, solver_steps=28, pictures={"pretrain": 2, "tune": 3, "eval": 3},
        rates={"base": 3e-4, "lora": 5e-4, "full": 1e-4},  # a LoRA starts at zero and is small beside this small model
    ),
    "smoke": Scale(
        resolution=64, double_layers=2, single_layers=5, heads=2, head_axes=(4, 6, 6), images_per_group=5,
        base_steps=4, base_batch=2, base_log=2, steps=8, batch=2, rank=4, validate_every=4, validated=2,
        workers=0, solver_steps=2, pictures={"pretrain": 1, "eval": 1},
        rates={"base": 1e-2, "lora": 1e-2, "full": 1e-3},
    ),
}  # fmt: skip


def base_config(out: Path, scale: Scale) -> FinetuneConfig:
    """All weights from scratch on the groups that are not held out; at a constant rate, so it may stop any time."""
    return _config(
        out,
        scale,
        "base",
        pretrained_model_name_or_path=str(out / "base"),
        data=_data(out, "pretrain"),
        model_type="full",
        use_ema=True,
        max_train_steps=scale.base_steps,
        train_batch_size=scale.base_batch,
        learning_rate=scale.rates["base"],
        adam_beta2=0.99,
        lr_warmup_steps=scale.base_steps // 25,
        eval_steps_interval=max(1, scale.base_steps // 25),
        checkpoint_step_interval=max(1, scale.base_steps // 4),
        logging_steps=scale.base_log,
    )


def arm_config(out: Path, scale: Scale, arm: Arm, *, compiled: bool) -> FinetuneConfig:
    """An arm as the product's config."""
    return _config(
        out,
        scale,
        arm.name,
        pretrained_model_name_or_path=str(out / "trained"),
        data=_data(out, "tune"),
        model_type=arm.kind,
        lora_rank=scale.rank,
        tread_config=arm.tread_config(scale.steps),
        compile=compiled,
        seed=arm.seed,
        routed_loss=arm.routed_loss,
        max_train_steps=scale.steps,
        train_batch_size=scale.batch,
        learning_rate=scale.rates[arm.kind],
        eval_steps_interval=scale.validate_every,
        checkpoint_step_interval=scale.steps,
        logging_steps=min(10, scale.validate_every),
    )


def _data(out: Path, name: str) -> tuple[dict[str, Any], ...]:
    """A folder to train on, and the held-out images that no run trains on."""
    held_out = {"id": "eval", "instance_data_dir": str(out / "data" / "eval"), "dataset_type": "eval"}
    return {"id": name, "instance_data_dir": str(out / "data" / name)}, held_out


def _config(out: Path, scale: Scale, name: str, **settings: Any) -> FinetuneConfig:
    import torch

    return FinetuneConfig(
        model_family="flux",
        resolution=scale.resolution,
        resolution_type="pixel",
        cache_dir=str(out / "cache"),
        vae_batch_size=8,
        text_encoder_batch_size=64,
        tokenizer_max_length=TEXT_LENGTH,
        dataloader_num_workers=scale.workers,
        gradient_checkpointing=False,
        mixed_precision="bf16" if torch.cuda.is_available() else "no",
        output_dir=str(out / "runs" / name),
        checkpoints_total_limit=1,
        resume_from_checkpoint="latest",
        num_eval_images=scale.validated,
        report_to="none",
        **settings,
    )
