"""The jobs at tiny size: what each needs, made once, and its command, which goes on with what is there.

Paths of what a job writes are relative to its folder, so that no file names the folder of one case.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.tiny.autoencoders import kl_autoencoder
from tests.tiny.pictures import write_noise
from tests.tiny.runs import TINY, write_images
from tests.tiny.weights import randomised

ROUTES = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": -2}], "schedule": None}
TRAIN = [
    *["train", *TINY, "output_dir=run", "resume=latest", "train.steps=6", "checkpoint.every=2", "checkpoint.keep=9"],
    *["log.every=2", "validation.every=3", "sample.every=3", "sample.steps=2", "sample.per_class=1"],
]
FINETUNE: dict[str, Any] = {
    "model_family": "flux",
    "output_dir": "run",
    "cache_dir": "cache",
    "resume_from_checkpoint": "latest",
    "tokenizer_max_length": 32,
    "max_train_steps": 4,
    "train_batch_size": 2,
    "vae_batch_size": 1,  # on some CPUs a batch of another size, as after a fault, rounds differently
    "checkpoint_step_interval": 2,
    "checkpoints_total_limit": 9,
    "eval_steps_interval": 2,
    "validation_num_inference_steps": 1,
    "mixed_precision": "no",
    "report_to": "none",
}


@dataclass(frozen=True)
class Job:
    """A job; `command` makes what it needs in a folder and returns the arguments of `tread`."""

    command: Callable[[Path], list[str]]
    workers: bool = False
    """Whether data workers read for it."""


def _train(*settings: str) -> Callable[[Path], list[str]]:
    return lambda _: [*TRAIN, *settings]


def _encode(inputs: Path) -> list[str]:
    images = write_images(inputs / "images", "cat", "dog", count=4, size=16)
    (images / "cat" / "1.png").write_bytes(b"broken")
    kl_autoencoder(channels=4, stages=2).save_pretrained(inputs / "vae")
    sizes = ["--size", "16", "--batch-size", "2", "--shard-size", "3"]
    return ["encode", str(images), "--vae", str(inputs / "vae"), "--out", "latents", *sizes]


def _finetune(**keys: Any) -> Callable[[Path], list[str]]:
    def command(inputs: Path) -> list[str]:
        from tests.tiny.pipelines.flux import build

        build().save_pretrained(inputs / "flux")
        write_noise(inputs / "data", [(64, 64)] * 4)
        data = {"instance_data_dir": str(inputs / "data"), "resolution": 64}
        known = {"pretrained_model_name_or_path": str(inputs / "flux"), "data": data}
        (inputs / "config.json").write_text(json.dumps(FINETUNE | known | keys))
        return ["finetune", str(inputs / "config.json")]

    return command


def _eval(inputs: Path) -> list[str]:
    from transformers import Dinov2Config, Dinov2Model

    for name, size in (("samples", 16), ("reference", 12)):
        write_images(inputs / name, "all", count=6, size=size)
    config = Dinov2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28)
    randomised(Dinov2Model(config)).save_pretrained(inputs / "tiny")
    weights = ["--features", "dinov2", "--weights", str(inputs / "tiny")]
    kept = ["--work", "work", "--save", "batch.npz", "--batch-size", "2", "--json"]
    return ["eval", str(inputs / "samples"), "--ref", str(inputs / "reference"), *weights, *kept]


JOBS = {
    "train": Job(_train("model=dit", "model.tread_config=null")),
    "train-routed": Job(_train("train.micro_steps=2", "train.workers=1", "checkpoint.keep=2"), workers=True),
    "encode": Job(_encode),
    "finetune-lora": Job(
        _finetune(
            use_ema=True,
            tread_config=ROUTES,
            validation_prompt="a cat",
            validation_steps=2,
            dataloader_num_workers=1,
        ),
        workers=True,
    ),
    "finetune-full": Job(_finetune(model_type="full", learning_rate=1e-3)),
    "eval": Job(_eval),
}
