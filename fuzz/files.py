"""Checkpoints, shards, caches, statistics, images and weights: whole files, and what reads them."""

import io
import json
import random
import tarfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save
from torch import nn

from fuzz.mutate import mutated_bytes


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def model_file() -> bytes:
    return save({name: tensor.detach() for name, tensor in linear().state_dict().items()})


def optimizer_file() -> bytes:
    from tread.training.parts import optimizer_tensors

    return save(optimizer_tensors(trained()[1]))


def manifest() -> dict[str, Any]:
    return {"step": 3, "id": "0", "files": {"model.safetensors": len(model_file())}, "facts": {"loss": 0.5}}


STEP = "step-00000003"


def read_manifest(path: Path) -> None:
    from tread.training.checkpoint import newest

    (path.parent / "model.safetensors").write_bytes(model_file())
    newest(path.parents[1], lambda _: None)


def read_model(path: Path) -> None:
    from tread.training.parts import load_into

    load_into(linear().state_dict(), path.parent, "model")


def read_optimizer(path: Path) -> None:
    from tread.training.parts import load_optimizer, load_part

    load_optimizer(trained()[1], load_part(path.parent, "optimizer"), path)


class Block(nn.Module):
    """A transformer of one linear, named as FLUX names its first."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.ModuleDict({"attn": nn.ModuleDict({"to_out": nn.ModuleList([nn.Linear(3, 2)])})})
        self.transformer_blocks = nn.ModuleList([inner])


def adapter_file() -> bytes:
    """A LoRA of rank 1 in diffusers' names, with the alpha of its config in the header."""
    name, settings = "transformer.transformer_blocks.0.attn.to_out.0", {"transformer.lora_alpha": 2, "transformer.r": 1}
    tensors = {f"{name}.lora_A.weight": torch.ones(1, 3), f"{name}.lora_B.weight": torch.ones(2, 1)}
    return save(tensors, metadata={"lora_adapter_metadata": json.dumps(settings)})


def kohya_file() -> bytes:
    """The same in kohya's names."""
    name = "lora_unet_double_blocks_0_img_attn_proj"
    factors = {f"{name}.lora_down.weight": torch.ones(1, 3), f"{name}.lora_up.weight": torch.ones(2, 1)}
    return save({**factors, f"{name}.alpha": torch.tensor(2.0)})


def read_adapter(path: Path) -> None:
    from tread.finetune.model import adapters, existing
    from tread.finetune.settings import FinetuneConfig

    targets = ("attn.to_out.0",)
    required: dict[str, Any] = {"model_family": "flux", "pretrained_model_name_or_path": "m", "data": "d"}
    config = FinetuneConfig(**required, init_lora=str(path), lora_rank=1, lora_targets=targets)
    family: Any = Namespace(name="flux", lora_targets=targets, source=Namespace(pipeline_name="FluxPipeline"))
    model = Block()
    found = existing.read_adapter(config, family, "transformer", model)
    adapters.add_adapter(model, kind="standard", rank=1, alpha=1, targets=targets, seed=0)
    existing.put_in(model, found, str(path))


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def npz(**arrays: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)  # pyright: ignore[reportArgumentType]
    return out.getvalue()


def tar(latent: bytes, label: bytes = b"1") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in (("a.latent.npy", latent), ("a.cls", label)):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


LATENT = npy(np.zeros((4, 2, 2), np.float16))


def members(rng: random.Random) -> bytes:
    odd = (LATENT, npz(a=np.zeros(3)), npy(np.zeros((0, 2, 2))), npy(np.zeros(3, "S3")), npy(np.array(1.0)))
    return tar(mutated_bytes(rng.choice(odd), rng), mutated_bytes(b"1", rng) if rng.random() < 0.3 else b"1")


def read_shard(path: Path) -> None:
    from tread.data.latents import Latents

    Latents(path, num_classes=3)[0]


def index_file() -> bytes:
    return npz(key=np.array([b"a"]), offset=np.array([512]), size=np.array([len(LATENT)]), label=np.array([1]))


def read_index(path: Path) -> None:
    from tread.data.index import _cache_file

    shard = path.with_name("shard.tar")
    shard.write_bytes(tar(LATENT))
    cached = _cache_file(shard)
    cached.parent.mkdir(parents=True, exist_ok=True)
    cached.write_bytes(path.read_bytes())
    try:
        read_shard(shard)
    finally:
        cached.unlink(missing_ok=True)


METRICS = "".join(json.dumps({"step": step, "loss": 0.5, "rate": 1e-4}) + "\n" for step in range(1, 5))


def read_metrics(path: Path) -> None:
    from tread.training.metrics import cut_back, read_metrics

    read_metrics(path.parent)
    cut_back(path, 3)


def read_prompts(path: Path) -> None:
    from tread.finetune.config import read_config

    required = {"model_family": "flux", "pretrained_model_name_or_path": "m", "data": "d"}
    config = path.with_name("config.json")
    config.write_text(json.dumps(required | {"validation_prompt": str(path)}))
    read_config(config)


MEASUREMENTS = {
    "format": 1,
    "subject": {"device": "cpu", "levels": [0.1, 0.5]},
    "starts": [{"command": "tread autotune"}],
    "kept": {"0.5 2..4": 8},
    "seconds": {"": 0.5},
    "losses": {},
    "verified": {},
}


def read_measurements(path: Path) -> None:
    from tread.autotune.store import Store

    Store(path.parent, MEASUREMENTS["subject"], {}).write()


COLLECTIVES = {
    "world": 8,
    "nodes": 1,
    "backend": "nccl",
    "rows": [
        {"collective": name, "bytes": size, "bus_gb_per_s": 100.0}
        for name in ("all_reduce", "all_gather", "reduce_scatter")
        for size in (65536, 1 << 24)
    ],
}


def read_collectives(path: Path) -> None:
    from tread.report.planning.links import read_links

    links = read_links([path])
    for nodes in (1, 2):
        links.of(nodes).seconds("all_reduce", 1e6, 8, 8)


def read_cached(path: Path) -> None:
    from tread.finetune.data.cache import Cache

    cache = Cache(path.parents[2])
    cache.has("text", path.stem)
    cache.load("text", path.stem)


def read_hashes(path: Path) -> None:
    from tread.finetune.data.cache import Cache

    Cache(path.parent).hashes.of([path], progress=False)


def statistics_file() -> bytes:
    return npz(mu=np.zeros(3), sigma=np.eye(3), count=np.array(5), mu_s=np.zeros(2), sigma_s=np.eye(2))


def odd_statistics(rng: random.Random) -> bytes:
    odd = (np.zeros(3), np.eye(3), np.array("x"), np.zeros(0), np.array([1j]), np.zeros((2, 2, 2)), np.array(np.inf))
    names = ("mu", "sigma", "count", "mu_s", "sigma_s", "features", "arr_0")
    chosen = {name: rng.choice(odd) for name in names if rng.random() < 0.5}
    data = npz(**{"mu": np.zeros(3), "sigma": np.eye(3), **chosen})
    return mutated_bytes(data, rng) if rng.random() < 0.3 else data


def read_statistics(path: Path) -> None:
    from tread.evaluate.statistics import read_statistics

    read_statistics(path)


def tally_file() -> bytes:
    facts = {
        "features": np.array("x"),
        "total": np.array(4),
        "keep_vectors": np.array(True),
        "vectors": np.zeros((4, 2)),
    }
    moments = {"pool.count": np.array(4), "pool.mean": np.zeros(2), "pool.scatter": np.eye(2)}
    return npz(
        **facts, **moments, **{"score.counts": np.ones(1), "score.sums": np.ones((1, 2)), "score.logs": np.ones(1)}
    )


def odd_tally(rng: random.Random) -> bytes:
    with np.load(io.BytesIO(tally_file())) as file:
        arrays = dict(file)
    odd = (np.zeros(3), np.array("x"), np.zeros(0), np.array(1.5), np.zeros((2, 2, 2)), np.array(-1), None)
    for name in rng.sample(list(arrays), 2):
        arrays[name] = rng.choice(odd)
    data = npz(**{name: array for name, array in arrays.items() if array is not None})
    return mutated_bytes(data, rng) if rng.random() < 0.3 else data


def read_tally(path: Path) -> None:
    from tread.evaluate.statistics import Tally

    Tally.load(path).statistics()


def odd_batch(rng: random.Random) -> bytes:
    shape = tuple(rng.choice((0, 1, 2, 3)) for _ in range(rng.choice((0, 3, 4, 4, 4, 5))))
    return mutated_bytes(npz(arr_0=np.zeros(shape, rng.choice((np.uint8, np.float32)))), rng)


def read_images(path: Path) -> None:
    from tread.evaluate.images import has_images, open_images

    has_images(path)
    source = open_images(path)
    source.read(0, min(4, len(source)))


def image_file() -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(out, "png")
    return out.getvalue()


def read_picture(path: Path) -> None:
    from tread.data.captioned.pixels import probe
    from tread.data.images import read_image

    read_image(path, 8)
    probe(path)


def read_table(path: Path) -> None:
    from tread.data.captioned.entries import DataConfig
    from tread.data.captioned.finding import find

    list(find(DataConfig(metadata_file=str(path))))


def weights_file() -> bytes:
    out = io.BytesIO()
    torch.save(linear().state_dict(), out)
    return out.getvalue()


def training_checkpoint() -> bytes:
    """As facebookresearch/DiT's train.py saves one."""
    out = io.BytesIO()
    state = linear().state_dict()
    torch.save({"model": state, "ema": state, "opt": {}, "args": Namespace(model="DiT-XL/2")}, out)
    return out.getvalue()


def read_training_checkpoint(path: Path) -> None:
    from tread.pretrain.build import read_weights

    read_weights(path)


def read_weights(path: Path) -> None:
    from tread.evaluate.features import _load

    _load(linear(), path)
