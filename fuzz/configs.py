"""Configs and other documents: mutations of those that ship with tread, and what reads them."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

from fuzz.mutate import mutated_bytes
from fuzz.reader import Make, json_of
from tread.config.documents import parse_yaml, settled

ROOT = Path(__file__).resolve().parents[1]


@cache
def documents(pattern: str) -> list[dict[str, Any]]:
    """Configs that ship with tread; one without data gets a path, so that it is read to its end."""
    found = [settled(parse_yaml(path.read_text())) for path in sorted(ROOT.glob(pattern))]
    for document in found:
        if isinstance(document.get("data"), dict):
            document["data"]["path"] = "x"
    return found


def recipes(pattern: str) -> Make:
    return lambda rng: json_of(*documents(pattern))(rng)


TEXTS = (
    "a: &a [x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a]\nc: &c [*b, *b, *b, *b, *b]\nd: [*c, *c, *c]\n",
    "a: &a {x: 1, y: *a}\ntrain: {steps: 5}\n",
    "m: &m {k: 1}\nn: &n {<<: [*m, *m, *m]}\no: {<<: [*n, *n, *n, *n]}\n",
    "train: {steps: !!int 5, x: !!timestamp 2020-01-01, y: !!binary aGk=, z: !!set {a, b}}\n",
    'output_dir: "\\uD800 \\x00 \\U0001F600"\nresume: 2020-01-01\nmodel: dit\n',
    "defaults: [{model: dit}, _self_]\nmodel: {size: S/2}\ndata: {path: 0x10, name: images}\n",
)


def yaml(rng: random.Random) -> bytes:
    sources = [*TEXTS, *(path.read_text() for path in sorted(ROOT.glob("recipes/*.yaml"))[:2])]
    return mutated_bytes(rng.choice(sources).encode(), rng)


SETTINGS = (
    "train.steps=100", "model=dit", "model.tread_config.routes[0].selection_ratio=0.5", "data.path=x", "data=images",
    "optimizer.betas=[0.9, 0.99]", "model.tread_config={preset: paper}", "seed=3", "train={steps: 3}", "resume=latest",
)  # fmt: skip


def arguments(rng: random.Random) -> bytes:
    return mutated_bytes(rng.choice(SETTINGS).encode(), rng).replace(b"\0", b"")  # no argument can have one


def read_arguments(path: Path) -> None:
    from tread.pretrain.config import compose

    compose([path.read_bytes().decode(errors="surrogateescape")])


def read_train(path: Path) -> None:
    from tread.pretrain.config import compose

    compose([str(path)])


def read_run(path: Path) -> None:
    from tread.pretrain.config import from_run

    from_run(path.parent)


FINETUNE = {
    "model_family": "flux", "pretrained_model_name_or_path": "model", "model_type": "lora", "lora_type": "lycoris",
    "lycoris_config": {"algo": "lokr", "factor": 4, "linear_dim": 8, "linear_alpha": 8, "multiplier": 1},
    "data": [{"instance_data_dir": "photos", "repeats": 2, "video": {"num_frames": 5}, "huggingface": {"split": "a"}}],
    "tread_config": {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -2}]},
    "--optimizer": "bnb-lion8bit", "--learning_rate": "1e-4", "lr_scheduler": "polynomial", "max_grad_norm": 1.0,
    "validation_prompt": "a cat", "user_prompt_library": {"a": "b"}, "validation_resolution": "64x64", "seed": 1,
    "base_model_precision": "int8-quanto", "flow_schedule_shift": 3, "attention_mechanism": "diffusers",
    "mixed_precision": "bf16", "dynamo_backend": "no", "model_flavour": "dev", "betas": [0.9, 0.99],
}  # fmt: skip
ENTRIES = [
    {"id": "a", "type": "local", "instance_data_dir": "photos", "crop": True, "resolution": 512, "repeats": 1,
     "caption_strategy": "filename", "resolution_type": "pixel", "aws_secret_access_key": "hidden"},
    {"id": "t", "dataset_type": "text_embeds", "disabled": False},
    {"id": "h", "type": "huggingface", "dataset_name": "set", "huggingface": {"image_column": "x"}},
    {"id": "m", "dataset_type": "conditioning", "conditioning_type": "mask", "instance_data_dir": "masks"},
    {"type": "csv", "metadata_file": "a.csv", "video": {"num_frames": 5, "is_i2v": True}},
]  # fmt: skip


def read_finetune(path: Path) -> None:
    from tread.finetune.compat.translate import translate
    from tread.finetune.config import describe, read_config, read_mapping

    describe(translate(read_mapping(path)))
    read_config(path)


def read_entries(path: Path) -> None:
    config = path.with_name("named.json")
    config.write_text(json.dumps({**FINETUNE, "data": None, "data_backend_config": str(path)}))
    read_finetune(config)


PLAN = {
    "routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": 4},
               {"selection_ratio": 0.25, "start_layer_idx": 5, "end_layer_idx": -2}],
    "selector": "l1", "importance": 0.5, "seed": 7, "reference_tokens": "keep",
    "schedule": {"warmup_steps": 10, "cooldown_fraction": 0.1, "total_steps": 100},
}  # fmt: skip


def read_plan(path: Path) -> None:
    from tread.report.plan import describe_plan

    describe_plan(str(path), depth=12, width=8, tokens=16)


INDEX = {
    "_class_name": "FluxPipeline", "_diffusers_version": "0.30.0", "vae": ["diffusers", "AutoencoderKL"],
    "tokenizer": ["transformers", "CLIPTokenizer"], "text_encoder": ["transformers", "CLIPTextModel"],
    "transformer": ["diffusers", "FluxTransformer2DModel"], "scheduler": ["diffusers", "EulerDiscreteScheduler"],
}  # fmt: skip


def read_source(path: Path) -> None:
    from tread.finetune.model.source import Source

    source = Source(str(path.parent))
    source.check("tokenizer", "text_encoder", "vae")
    source.depth  # noqa: B018


def read_part(path: Path) -> None:
    from tread.finetune.model.source import Source

    (path.parents[1] / "model_index.json").write_text(json.dumps(INDEX))
    source = Source(str(path.parents[1]))
    source.depth  # noqa: B018
    source.check("text_encoder")
