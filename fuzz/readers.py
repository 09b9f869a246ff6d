"""The readers of tread: for each, a whole file, and what reads it. `READERS` names them."""

import io
import json
import random
import tarfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save
from torch import nn

from fuzz.mutate import mutated, mutated_bytes
from tread.config.documents import parse_yaml, settled

ROOT = Path(__file__).resolve().parents[1]
Make = Callable[[random.Random], bytes]
Read = Callable[[Path], object]


@dataclass(frozen=True)
class Reader:
    """`make` gives the bytes of a mutated file called `file`; `read` is given the path where they lie."""

    file: str
    make: Make
    read: Read
    share: int = 1
    """Weight among all readers."""


@cache
def _documents(pattern: str) -> list[dict[str, Any]]:
    """Configs that ship with tread; one without data gets a path, so that it is read to its end."""
    found = [settled(parse_yaml(path.read_text())) for path in sorted(ROOT.glob(pattern))]
    for document in found:
        if isinstance(document.get("data"), dict):
            document["data"]["path"] = "x"
    return found


def _json_of(*documents: Any) -> Make:
    """Mutations of one of the documents, as JSON (and as YAML: JSON is nearly a part of it); some of its bytes too."""

    def make(rng: random.Random) -> bytes:
        data = json.dumps(mutated(rng.choice(documents), rng)).encode()
        return mutated_bytes(data, rng) if rng.random() < 0.1 else data

    return make


def _recipes(pattern: str) -> Make:
    return lambda rng: _json_of(*_documents(pattern))(rng)


def _bytes_of(data: Callable[[], bytes]) -> Make:
    return lambda rng: mutated_bytes(cache(data)(), rng)


TEXTS = (
    "a: &a [x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a]\nc: &c [*b, *b, *b, *b, *b]\nd: [*c, *c, *c]\n",
    "a: &a {x: 1, y: *a}\ntrain: {steps: 5}\n",
    "m: &m {k: 1}\nn: &n {<<: [*m, *m, *m]}\no: {<<: [*n, *n, *n, *n]}\n",
    "train: {steps: !!int 5, x: !!timestamp 2020-01-01, y: !!binary aGk=, z: !!set {a, b}}\n",
    'output_dir: "\\uD800 \\x00 \\U0001F600"\nresume: 2020-01-01\nmodel: dit\n',
    "defaults: [{model: dit}, _self_]\nmodel: {size: S/2}\ndata: {path: 0x10, name: images}\n",
)


def _yaml(rng: random.Random) -> bytes:
    sources = [*TEXTS, *(path.read_text() for path in sorted(ROOT.glob("recipes/*.yaml"))[:2])]
    return mutated_bytes(rng.choice(sources).encode(), rng)


SETTINGS = (
    "train.steps=100", "model=dit", "model.tread_config.routes[0].selection_ratio=0.5", "data.path=x", "data=images",
    "optimizer.betas=[0.9, 0.99]", "model.tread_config={preset: paper}", "seed=3", "train={steps: 3}", "resume=latest",
)  # fmt: skip


def _arguments(rng: random.Random) -> bytes:
    return mutated_bytes(rng.choice(SETTINGS).encode(), rng).replace(b"\0", b"")  # no argument can have one


def _read_arguments(path: Path) -> None:
    from tread.pretrain.config import compose

    compose([path.read_bytes().decode(errors="surrogateescape")])


def _read_train(path: Path) -> None:
    from tread.pretrain.config import compose

    compose([str(path)])


def _read_run(path: Path) -> None:
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


def _read_finetune(path: Path) -> None:
    from tread.finetune.compat.translate import translate
    from tread.finetune.config import describe, read_config, read_mapping

    describe(translate(read_mapping(path)))
    read_config(path)


def _read_entries(path: Path) -> None:
    config = path.with_name("named.json")
    config.write_text(json.dumps({**FINETUNE, "data": None, "data_backend_config": str(path)}))
    _read_finetune(config)


PLAN = {
    "routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": 4},
               {"selection_ratio": 0.25, "start_layer_idx": 5, "end_layer_idx": -2}],
    "selector": "l1", "importance": 0.5, "seed": 7, "reference_tokens": "keep",
    "schedule": {"warmup_steps": 10, "cooldown_fraction": 0.1, "total_steps": 100},
}  # fmt: skip


def _read_plan(path: Path) -> None:
    from tread.report.plan import describe_plan

    describe_plan(str(path), depth=12, width=8, tokens=16)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def _model_file() -> bytes:
    return save({name: tensor.detach() for name, tensor in _model().state_dict().items()})


def _optimizer_file() -> bytes:
    from tread.training.checkpoint import optimizer_tensors

    return save(optimizer_tensors(_trained()[1]))


def _manifest() -> dict[str, Any]:
    return {"step": 3, "id": "0", "files": {"model.safetensors": len(_model_file())}, "facts": {"loss": 0.5}}


STEP = "step-00000003"


def _read_manifest(path: Path) -> None:
    from tread.training.checkpoint import newest

    (path.parent / "model.safetensors").write_bytes(_model_file())
    newest(path.parents[1], lambda _: None)


def _read_model(path: Path) -> None:
    from tread.training.checkpoint import load_part, load_tensors

    load_tensors(_model().state_dict(), load_part(path.parent, "model"), path)


def _read_optimizer(path: Path) -> None:
    from tread.training.checkpoint import load_optimizer, load_part

    load_optimizer(_trained()[1], load_part(path.parent, "optimizer"), path)


def _npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def _npz(**arrays: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.savez(out, allow_pickle=False, **arrays)
    return out.getvalue()


def _tar(latent: bytes, label: bytes = b"1") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in (("a.latent.npy", latent), ("a.cls", label)):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


LATENT = _npy(np.zeros((4, 2, 2), np.float16))


def _members(rng: random.Random) -> bytes:
    odd = (LATENT, _npz(a=np.zeros(3)), _npy(np.zeros((0, 2, 2))), _npy(np.zeros(3, "S3")), _npy(np.array(1.0)))
    return _tar(mutated_bytes(rng.choice(odd), rng), mutated_bytes(b"1", rng) if rng.random() < 0.3 else b"1")


def _read_shard(path: Path) -> None:
    from tread.data.latents import Latents

    Latents(path, num_classes=3)[0]


def _index_file() -> bytes:
    return _npz(key=np.array([b"a"]), offset=np.array([512]), size=np.array([len(LATENT)]), label=np.array([1]))


def _read_index(path: Path) -> None:
    from tread.data.index import _cache_file

    shard = path.with_name("shard.tar")
    shard.write_bytes(_tar(LATENT))
    cached = _cache_file(shard)
    cached.parent.mkdir(parents=True, exist_ok=True)
    cached.write_bytes(path.read_bytes())
    try:
        _read_shard(shard)
    finally:
        cached.unlink(missing_ok=True)


METRICS = "".join(json.dumps({"step": step, "loss": 0.5, "rate": 1e-4}) + "\n" for step in range(1, 5))


def _read_metrics(path: Path) -> None:
    from tread.training.metrics import cut_back, read_metrics

    read_metrics(path.parent)
    cut_back(path, 3)


def _read_cached(path: Path) -> None:
    from tread.finetune.data.cache import Cache

    cache = Cache(path.parents[2])
    cache.has("text", path.stem)
    cache.load("text", path.stem)


def _read_hashes(path: Path) -> None:
    from tread.finetune.data.cache import Cache

    Cache(path.parent).hashes.of([path], progress=False)


INDEX = {
    "_class_name": "FluxPipeline", "_diffusers_version": "0.30.0", "vae": ["diffusers", "AutoencoderKL"],
    "tokenizer": ["transformers", "CLIPTokenizer"], "text_encoder": ["transformers", "CLIPTextModel"],
    "transformer": ["diffusers", "FluxTransformer2DModel"], "scheduler": ["diffusers", "EulerDiscreteScheduler"],
}  # fmt: skip


def _read_source(path: Path) -> None:
    from tread.finetune.source import Source

    source = Source(str(path.parent))
    source.check("tokenizer", "text_encoder", "vae")
    source.depth  # noqa: B018


def _read_part(path: Path) -> None:
    from tread.finetune.source import Source

    (path.parents[1] / "model_index.json").write_text(json.dumps(INDEX))
    source = Source(str(path.parents[1]))
    source.depth  # noqa: B018
    source.check("text_encoder")


def _statistics_file() -> bytes:
    return _npz(mu=np.zeros(3), sigma=np.eye(3), count=np.array(5), mu_s=np.zeros(2), sigma_s=np.eye(2))


def _odd_statistics(rng: random.Random) -> bytes:
    odd = (np.zeros(3), np.eye(3), np.array("x"), np.zeros(0), np.array([1j]), np.zeros((2, 2, 2)), np.array(np.inf))
    names = ("mu", "sigma", "count", "mu_s", "sigma_s", "features", "arr_0")
    chosen = {name: rng.choice(odd) for name in names if rng.random() < 0.5}
    data = _npz(**{"mu": np.zeros(3), "sigma": np.eye(3), **chosen})
    return mutated_bytes(data, rng) if rng.random() < 0.3 else data


def _read_statistics(path: Path) -> None:
    from tread.evaluate.statistics import read_statistics

    read_statistics(path)


def _tally_file() -> bytes:
    facts = {
        "features": np.array("x"),
        "total": np.array(4),
        "keep_vectors": np.array(True),
        "vectors": np.zeros((4, 2)),
    }
    moments = {"pool.count": np.array(4), "pool.mean": np.zeros(2), "pool.scatter": np.eye(2)}
    return _npz(
        **facts, **moments, **{"score.counts": np.ones(1), "score.sums": np.ones((1, 2)), "score.logs": np.ones(1)}
    )


def _odd_tally(rng: random.Random) -> bytes:
    with np.load(io.BytesIO(_tally_file())) as file:
        arrays = dict(file)
    odd = (np.zeros(3), np.array("x"), np.zeros(0), np.array(1.5), np.zeros((2, 2, 2)), np.array(-1), None)
    for name in rng.sample(list(arrays), 2):
        arrays[name] = rng.choice(odd)
    data = _npz(**{name: array for name, array in arrays.items() if array is not None})
    return mutated_bytes(data, rng) if rng.random() < 0.3 else data


def _read_tally(path: Path) -> None:
    from tread.evaluate.statistics import Tally

    Tally.load(path).statistics()


def _odd_batch(rng: random.Random) -> bytes:
    shape = tuple(rng.choice((0, 1, 2, 3)) for _ in range(rng.choice((0, 3, 4, 4, 4, 5))))
    return mutated_bytes(_npz(arr_0=np.zeros(shape, rng.choice((np.uint8, np.float32)))), rng)


def _read_images(path: Path) -> None:
    from tread.evaluate.images import has_images, open_images

    has_images(path)
    source = open_images(path)
    source.read(0, min(4, len(source)))


def _image_file() -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(out, "png")
    return out.getvalue()


def _read_picture(path: Path) -> None:
    from tread.data.captioned.pixels import probe
    from tread.data.images import read_image

    read_image(path, 8)
    probe(path)


def _read_table(path: Path) -> None:
    from tread.data.captioned.entries import DataConfig
    from tread.data.captioned.finding import find

    list(find(DataConfig(metadata_file=str(path))))


def _weights_file() -> bytes:
    out = io.BytesIO()
    torch.save(_model().state_dict(), out)
    return out.getvalue()


def _read_weights(path: Path) -> None:
    from tread.evaluate.features import _load

    _load(_model(), path)


READERS: dict[str, Reader] = {
    "train config, JSON": Reader("config.json", _recipes("recipes/*.yaml"), _read_train, 4),
    "train config, YAML": Reader("config.yaml", _yaml, _read_train, 2),
    "train settings": Reader("argument", _arguments, _read_arguments, 2),
    "run's own config": Reader("config.yaml", _recipes("configs/*.yaml"), _read_run, 1),
    "finetune config": Reader("config.json", _json_of(FINETUNE), _read_finetune, 6),
    "finetune recipes": Reader("config.json", _recipes("recipes/finetune/*.yaml"), _read_finetune, 3),
    "data entries": Reader("entries.json", _json_of(ENTRIES), _read_entries, 4),
    "plan": Reader("plan.json", _json_of(PLAN, {"tread_config": PLAN}, {"preset": "paper"}), _read_plan, 6),
    "plan, YAML": Reader("plan.yaml", _json_of(PLAN, {"tread_config": PLAN}), _read_plan, 2),
    "checkpoint manifest": Reader(f"{STEP}/checkpoint.json", lambda rng: _json_of(_manifest())(rng), _read_manifest, 6),
    "checkpoint model": Reader("model.safetensors", _bytes_of(_model_file), _read_model, 6),
    "checkpoint optimizer": Reader("optimizer.safetensors", _bytes_of(_optimizer_file), _read_optimizer, 6),
    "shard": Reader("a.tar", _bytes_of(lambda: _tar(LATENT)), _read_shard, 4),
    "shard's arrays": Reader("a.tar", _members, _read_shard, 4),
    "shard index": Reader("index.npz", _bytes_of(_index_file), _read_index, 2),
    "metrics": Reader("metrics.jsonl", _bytes_of(METRICS.encode), _read_metrics, 6),
    "cached item": Reader("text/ab/abcd.safetensors", _bytes_of(_model_file), _read_cached, 4),
    "cached hashes": Reader("hashes-0.json", _json_of({"/a": [1, 2, "f"], "/b": [3, 4, "e"]}), _read_hashes, 4),
    "model_index.json": Reader("model_index.json", _json_of(INDEX), _read_source, 4),
    "part's config": Reader(
        "transformer/config.json", _json_of({"_class_name": "FluxTransformer2DModel", "num_layers": 2}), _read_part, 1
    ),
    "statistics": Reader("reference.npz", _odd_statistics, _read_statistics, 4),
    "tally": Reader("tally.npz", _odd_tally, _read_tally, 4),
    "image batch": Reader("batch.npz", _odd_batch, _read_images, 4),
    "image tar": Reader("images.tar", _bytes_of(lambda: _tar(_image_file())), _read_images, 2),
    "image": Reader("image.png", _bytes_of(_image_file), _read_picture, 6),
    "table, CSV": Reader("table.csv", _bytes_of(lambda: b"file_name,text\na.png,a cat\nb.png,a dog\n"), _read_table, 4),
    "table, JSONL": Reader(
        "table.jsonl", _bytes_of(lambda: b'{"file_name": "a.png", "text": ["a", "b"]}\n' * 3), _read_table, 4
    ),
    "weights": Reader("weights.pth", _bytes_of(_weights_file), _read_weights, 4),
}  # fmt: skip


def quiet() -> None:
    """Warnings are not what is tested here."""
    warnings.simplefilter("ignore")
