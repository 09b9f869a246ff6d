"""Results of every family, loaded as their cards say in a process without tread; headers, cards and whole files."""

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from safetensors import safe_open
from torch import nn

from pages.finetune import loader_table
from tests.finetune.result.load_result import answer
from tests.programs import run
from tests.tiny.pipelines import FIRST, TINY
from tread.finetune.families import TUNE_FAMILIES, family_class, open_family
from tread.finetune.family import TuneFamily
from tread.finetune.model.adapters import add_adapter
from tread.finetune.model.source import Source
from tread.finetune.result import write as output
from tread.finetune.result.card import Facts, card, loading_lines
from tread.finetune.result.write import has_result, write_result
from tread.finetune.settings import FinetuneConfig

pytestmark = pytest.mark.filterwarnings("ignore")
PLAN = {
    "routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": 3}],
    "selector": "random",
    "seed": 42,
}
FAMILIES = (
    *FIRST,
    *("cogvideox-1.5-i2v", "cosmos-first", "flux-kontext", "flux2-klein", "hunyuanvideo-i2v", "hunyuanvideo1-i2v"),
    *(
        "kandinsky5_image-edit",
        "kandinsky5_video-i2v-first",
        "ltxvideo-first",
        "qwen_image-edit",
        "qwen_image-edit-2511",
        "wan-a14b",
    ),
    *("wan-flf2v", "wan-i2v"),
)
RESULTS = [
    *((name, "standard") for name in ("flux", "hidream", "ltxvideo2", "prx", "qwen_layered", "wan-a14b")),
    *(("flux", "lokr"), ("flux", "lycoris"), ("wan-a14b", "lycoris"), ("wan-a14b", "full"), ("pixart_sigma", "full")),
    *(("flux", "dora"), ("pixart_sigma", "dora")),
]
"""Families that are least alike, and each kind of file with each kind of loader."""
FURTHER = [result for kind in ("standard", "lokr") for name in FAMILIES if (result := (name, kind)) not in RESULTS]
"""Every other family."""
Folder = Callable[[str], Path]


def make_config(place: Path, name: str, kind: str, **changes: Any) -> FinetuneConfig:
    height, width = TINY[name].size
    settings: dict[str, Any] = {
        "model_family": TINY[name].family,
        "pretrained_model_name_or_path": str(place),
        "data": "images",
        "output_dir": f"runs/{name}-{kind}",
        "model_type": "full" if kind == "full" else "lora",
        "lora_type": "standard" if kind in ("full", "dora") else kind,
        "use_dora": kind == "dora",
        "lora_rank": 4,
        "lora_alpha": 6.0,
        "lycoris_config": {"algo": "lokr", "factor": 4} if kind == "lycoris" else None,
        "tread_config": PLAN,
        "validation_prompt": 'a "red" fox',
        "validation_resolution": f"{width}x{height}",
        "validation_num_video_frames": TINY[name].frames,
        "validation_num_inference_steps": 2,
    }
    return FinetuneConfig(**(settings | changes))


CALLS: dict[str, dict[str, Any]] = {}


def stock_call(family: TuneFamily, name: str) -> dict[str, Any]:
    """The arguments of one call of the transformer by the stock pipeline."""
    if name in CALLS:
        return CALLS[name]
    pipeline, tiny = family.source.pipeline(*family.source.parts), TINY[name]
    calls: list[dict[str, Any]] = []
    for part, _, _ in family.experts:
        getattr(pipeline, part).register_forward_pre_hook(
            lambda model, args, named: calls.append(inspect.signature(model.forward).bind(*args, **named).arguments),
            with_kwargs=True,
        )
    pixels = torch.randint(256, (1, 3, tiny.frames, *tiny.size), generator=torch.Generator().manual_seed(1))
    arguments = {"num_frames": tiny.frames} if family.video else {}
    arguments |= {"height": tiny.size[0], "width": tiny.size[1], **tiny.arguments(pixels / 127.5 - 1)}
    pipeline.set_progress_bar_config(disable=True)
    arguments = {key: value for key, value in arguments.items() if key in family.call_parameters}
    tiny.prepare(pipeline)
    pipeline(prompt="a cat", num_inference_steps=2, output_type="latent", **arguments)
    return CALLS.setdefault(name, calls[0])


def trained_models(family: TuneFamily, config: FinetuneConfig, call: dict[str, Any]) -> dict[str, nn.Module]:
    """The transformers after two steps, with an adapter or all weights."""
    models: dict[str, nn.Module] = {}
    for part, _, _ in family.experts:
        model = family.source.transformer(part, dtype=torch.float32)
        if config.adapts:
            add_adapter(
                model,
                kind=config.lora_type,
                rank=config.lora_rank,
                alpha=config.lora_alpha or 1,
                targets=family.lora_targets,
                seed=len(part),
                dora=config.use_dora,
                factor=4,
                lycoris_config=config.lycoris_config,  # pyright: ignore[reportArgumentType]
            )
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(2):
            (answer(model, call) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        models[part] = model.eval()
    return models


def save(place: Path, name: str, kind: str, folder: Path) -> dict[str, Any]:
    """Train, write the result and what it should compute; what the other process needs to know."""
    config = make_config(place, name, kind)
    family = open_family(config.model_family, Source(str(place)))
    call = stock_call(family, name)
    models = trained_models(family, config, call)
    manifest = {"step": 2, "tread_config": PLAN, "val_loss": 0.5, "references": TINY[name].references}
    write_result(folder, family, models, config, manifest)
    with torch.no_grad():
        base = {part: answer(family.source.transformer(part, dtype=torch.float32).eval(), call) for part in models}
        answers = {part: answer(model, call) for part, model in models.items()}
    torch.save({"call": call, "trained": answers, "base": base}, folder / "expected.pt")
    height, width = TINY[name].size
    for image in ("input.png", "input_2.png", "last.png"):
        Image.new("RGB", (width, height), "teal").save(folder / image)
    return {"folder": str(folder), "parts": list(models)}


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [RESULTS, pytest.param(FURTHER, marks=pytest.mark.contract)], ids=["some", "others"])
def test_a_result_does_what_its_card_says_without_tread(
    pipeline_folder: Folder, tmp_path: Path, chosen: list[tuple[str, str]]
):
    entries = [save(pipeline_folder(name), name, kind, tmp_path / f"{name}-{kind}") for name, kind in chosen]
    (tmp_path / "manifest.json").write_text(json.dumps(entries))
    run(Path(__file__).with_name("load_result.py"), tmp_path, CUDA_VISIBLE_DEVICES="")
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results) == sum(len(entry["parts"]) for entry in entries) >= len(chosen)
    for result in results:
        assert result["off"] < 1e-5, result
        assert result["moved"] > 1e-3, result
    for entry in entries:
        drawn = [*Path(entry["folder"]).glob("sample.*"), *Path(entry["folder"]).glob("layer-*.png")]
        assert drawn, "the card's program draws a sample"


@pytest.fixture(scope="module")
def flux(pipeline_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> tuple[TuneFamily, Path]:
    """A family and the folder of a LoRA's result."""
    place, folder = pipeline_folder("flux"), tmp_path_factory.mktemp("result")
    save(place, "flux", "standard", folder)
    return open_family("flux", Source(str(place))), folder


def test_the_header_says_where_it_came_from(flux: tuple[TuneFamily, Path]):
    family, folder = flux
    with safe_open(folder / "pytorch_lora_weights.safetensors", framework="pt") as file:
        header = file.metadata()
        names = list(file.keys())
    assert all(name.startswith("transformer.") for name in names)
    assert header["base_model"] == family.source.name_or_path
    assert json.loads(header["tread_config"]) == PLAN
    assert (header["steps"], header["rank"], header["adapter"]) == ("2", "4", "standard")
    assert json.loads(header["lora_adapter_metadata"])["transformer.lora_alpha"] == 6


def test_the_card(flux: tuple[TuneFamily, Path]):
    family, _ = flux
    config = make_config(Path(family.source.name_or_path), "flux", "standard", optimizer="lion", learning_rate=3e-5)
    facts: Facts = {
        "step": 700,
        "tread_config": {**PLAN, "schedule": {"warmup_steps": 10}},
        "val_loss": 0.12345,
        "tokens_kept": 0.5,
        "speedup": 1.618,
        "previews": [("a fox", "previews/step-00000700-0.png")],
    }
    text = card(family, ["transformer"], config, facts)
    front = yaml.safe_load(re.findall(r"\A---\n(.*?)---\n", text, flags=re.DOTALL)[0])
    assert front["base_model"] == family.source.name_or_path
    assert front["library_name"] == "diffusers"
    assert {"lora", "tread", "flux"} <= set(front["tags"])
    assert front["pipeline_tag"] == "text-to-image"
    assert front["widget"] == [{"text": "a fox", "output": {"url": "previews/step-00000700-0.png"}}]
    for fact in (
        "| steps | 700 |",
        "| rank, alpha | 4, 6 |",
        "| optimizer | lion, rate 3e-05, constant |",
        "0.5 dropped in layers 1 to 3; schedule",
        "| tokens kept in routed layers | 50% |",
        "| speed-up over dense by FLOPs | 1.62 |",
        "| dense validation loss | 0.1235 |",
        "![a fox](previews/step-00000700-0.png)",
    ):
        assert fact in text, fact
    dense = card(family, ["transformer"], config, {"step": 1, "tread_config": None})
    assert "token routing" not in dense
    assert "| routes | none: dense |" in dense
    precisions = {("no", "lora"): "fp32", ("bf16", "lora"): "bf16", ("bf16", "full"): "fp32"}
    for (mixed, kind), base in precisions.items():
        changed = replace(config, mixed_precision=mixed, model_type=kind)
        assert f"| precision of the base | {base} |" in card(family, ["transformer"], changed, facts)


def test_a_save_that_fails_leaves_the_earlier_result(
    flux: tuple[TuneFamily, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    family, _ = flux
    config = make_config(Path(family.source.name_or_path), "flux", "standard")
    call = stock_call(family, "flux")
    models = trained_models(family, config, call)
    paths = write_result(tmp_path, family, models, config, {"step": 1})
    before = {path.name: path.read_bytes() for path in paths}
    assert set(before) == {"pytorch_lora_weights.safetensors", "README.md", "result.json"}
    assert set(before) == {path.name for path in tmp_path.iterdir()}

    def no_space(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(output, "save_file", no_space)
    with pytest.raises(OSError, match="No space left"):
        write_result(tmp_path, family, models, config, {"step": 2})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_result_knows_its_checkpoint(flux: tuple[TuneFamily, Path], tmp_path: Path):
    """By the step and by the save: a step may be taken twice, with other settings."""
    family, _ = flux
    config = make_config(Path(family.source.name_or_path), "flux", "standard")
    models = trained_models(family, config, stock_call(family, "flux"))
    write_result(tmp_path, family, models, config, {"step": 3, "id": "a", "files": {}, "previews": [("a", "gone.png")]})
    assert has_result(tmp_path, {"step": 3, "id": "a"})
    assert not has_result(tmp_path, {"step": 3, "id": "b"})
    assert not has_result(tmp_path, {"step": 4, "id": "a"})
    assert "gone.png" not in (tmp_path / "README.md").read_text()
    (tmp_path / "README.md").unlink()
    assert not has_result(tmp_path, {"step": 3, "id": "a"})


def test_the_table_names_a_loader_for_every_pipeline():
    table = loader_table()
    lines = table.splitlines()[2:]
    assert lines[-1].startswith("| every other one | ")
    for name in TUNE_FAMILIES:
        for pipeline in family_class(name).pipelines:
            loads = [f"`{line}`" for line in loading_lines(pipeline, "standard", ["transformer"])]
            row = next((row for row in lines if f"`{pipeline}`" in row.split(" | ")[0]), lines[-1])
            assert all(line in row.split(" | ")[1] for line in loads), pipeline
    assert "`PeftModel.from_pretrained(pipeline.transformer, folder)`" in table
    assert "load_into_transformer_2=True" in table
