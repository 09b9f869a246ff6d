"""What `tread export` makes of an adapter: other programs' names, merged weights, other precisions.

Stock pipelines read the files; the transformer must answer as it did with the trained adapter.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.finetune.model.test_adapters import KINDS, adapted, trainable
from tests.finetune.result.load_result import answer
from tests.finetune.result.test_output import make_config, stock_call
from tests.finetune.trained import drawn
from tests.tiny.pictures import write_noise
from tests.tiny.transformers import call_flux, flux
from tread.cli import main
from tread.errors import ConfigError
from tread.finetune.families import open_family
from tread.finetune.model.adapters import add_adapter
from tread.finetune.model.merge import merge_adapter
from tread.finetune.model.original_names import Layout
from tread.finetune.model.source import Source
from tread.finetune.result.export import export
from tread.finetune.result.layout import write_layout
from tread.training.parts import load_part

pytestmark = pytest.mark.filterwarnings("ignore")
Folder = Callable[[str], Path]
LORA = "pytorch_lora_weights.safetensors"
READ = [
    ("comfyui", "wan"),
    ("kohya", "wan"),
    ("kohya", "qwen_image"),
    ("kohya", "z_image"),
    *(
        pytest.param(*case, marks=pytest.mark.contract)
        for case in (
            *(("comfyui", name) for name in ("qwen_image", "ltxvideo", "flux2", "krea2", "hidream")),
            ("kohya", "flux2"),
        )
    ),
]
"""Layouts that the stock pipeline reads at any width; FLUX's and HunyuanVideo's readers know 3072 alone."""
WHOLE_BLOCKS = {("kohya", "wan"): ("ffn.net.0.proj", "ffn.net.2")}
"""Linears that a stock reader insists on."""


@torch.no_grad()
def moved(model: nn.Module) -> nn.Module:
    """An adapted model whose adapter does something."""
    for seed, parameter in enumerate(trainable(model).values()):
        parameter.add_(0.1 * drawn(*parameter.shape, seed=seed))
    return model.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_model_keeps_its_dtype(kind: str):
    model = moved(adapted(kind, flux().to(torch.bfloat16)))
    merge_adapter(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(("layout", "name"), READ)
@torch.no_grad()
def test_the_stock_pipeline_reads_it(layout: Layout, name: str, pipeline_folder: Folder, tmp_path: Path):
    config = make_config(pipeline_folder(name), name, "standard")
    family = open_family(config.model_family, Source(str(pipeline_folder(name))))
    call = stock_call(family, name)
    model = family.source.transformer("transformer", dtype=torch.float32).eval()
    base = answer(model, call)
    targets = (*family.lora_targets, *WHOLE_BLOCKS.get((layout, name), ()))
    add_adapter(model, kind="standard", rank=4, alpha=6, targets=targets, seed=0)
    expected = answer(moved(model), call)
    (path,) = write_layout(tmp_path, layout, {"transformer": model}, config, {"step": 3})
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["steps"] == "3"
        prefix = "diffusion_model." if layout == "comfyui" else "lora_unet_"
        assert all(key.startswith(prefix) for key in file.keys())  # noqa: SIM118
    pipeline = family.source.pipeline(*family.source.parts)
    pipeline.load_lora_weights(str(path))
    found = answer(pipeline.transformer.eval(), call)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (expected - base).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_merged_model_is_a_stock_one(kind: str, tmp_path: Path):
    model = moved(adapted(kind, flux()))
    expected = call_flux(model)
    assert not torch.allclose(call_flux(flux().eval()), expected, atol=1e-3)
    merge_adapter(model)
    assert model.state_dict().keys() == flux().state_dict().keys()
    torch.testing.assert_close(call_flux(model), expected, rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path)  # pyright: ignore[reportCallIssue]
    loaded = FluxTransformer2DModel.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(call_flux(loaded), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["standard", "dora"])
def test_a_bf16_weight_is_rounded_once(kind: str):
    model = moved(adapted(kind, flux().to(torch.bfloat16)))
    name = "transformer_blocks.0.attn.to_q"
    layer: Any = model.get_submodule(name)
    down, up = layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach()
    expected = layer.base_layer.weight.float() + 2 * up @ down  # alpha 8, rank 4
    if kind == "dora":
        magnitude = layer.lora_magnitude_vector["default"].weight.detach()
        expected *= (magnitude / expected.norm(dim=1))[:, None]
    merge_adapter(model)
    found = model.get_parameter(f"{name}.weight")
    assert (found != expected.bfloat16()).float().mean() < 0.01, "but for sums that lie between two numbers"


@pytest.fixture(scope="module")
def run(pipeline_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`run("name", "key=value")`: a fine-tune of FLUX in two steps."""
    place = tmp_path_factory.mktemp("forms")
    keys = {
        "model_family": "flux",
        "pretrained_model_name_or_path": str(pipeline_folder("flux")),
        "data": {"instance_data_dir": str(write_noise(place / "data", [(64, 64)] * 2)), "resolution": 64},
        "cache_dir": str(place / "cache"),
        "tokenizer_max_length": 32,
        "max_train_steps": 2,
        "learning_rate": 0.02,
        "lora_rank": 4,
        "eval_steps_interval": 0,
        "mixed_precision": "no",
        "report_to": "none",
    }
    (place / "config.json").write_text(json.dumps(keys))

    def train(name: str, *settings: str) -> Path:
        if not (place / name).exists():
            main(["finetune", str(place / "config.json"), f"output_dir={place / name}", *settings])
        return place / name

    return train


def with_lora(base: Path, folder: Path) -> dict[str, Tensor]:
    """The weights of the stock transformer with a result's LoRA in them, by the definition of a LoRA."""
    weights = load_file(base / "transformer" / "diffusion_pytorch_model.safetensors")
    tensors = load_file(folder / LORA)
    for key, down in tensors.items():
        if key.endswith(".lora_A.weight"):
            name = key.removeprefix("transformer.").removesuffix(".lora_A.weight")
            weights[f"{name}.weight"] += tensors[key.replace("lora_A", "lora_B")] @ down  # alpha is the rank
    return weights


def test_export_merges(run: Callable[..., Path], pipeline_folder: Folder, tmp_path: Path):
    folder, out = run("lora"), tmp_path / "merged"
    main(["export", str(folder), "--merge", "--out", str(out)])
    assert {path.name for path in out.iterdir()} == {"transformer", "README.md", "result.json"}
    found = load_file(out / "transformer" / "diffusion_pytorch_model.safetensors")
    expected = with_lora(pipeline_folder("flux"), folder)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    card = (out / "README.md").read_text()
    assert "Weights with a LoRA merged into them, for" in card
    assert "| trained | LoRA, merged into the base |" in card
    assert 'FluxTransformer2DModel.from_pretrained(folder, subfolder="transformer"' in card
    main(["export", str(folder), "--merge", "--out", str(out), "--dtype", "bf16"])  # in place of the earlier one
    found = load_file(out / "transformer" / "diffusion_pytorch_model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


def test_merged_weights_never_go_to_a_run_that_was_moved(run: Callable[..., Path], tmp_path: Path):
    """Its config names the folder that it was trained in."""
    moved = tmp_path / "moved"
    shutil.copytree(run("lora"), moved)
    (moved / LORA).unlink()
    with pytest.raises(ConfigError, match="name a folder for them with --out"):
        export(moved, merge=True, out=moved)
    assert not (moved / LORA).exists()


def test_a_base_model_that_has_moved_is_named_with_its_setting(run: Callable[..., Path], tmp_path: Path):
    copied = shutil.copytree(run("lora"), tmp_path / "run")
    config = copied / "config.yaml"
    base = next(line for line in config.read_text().splitlines() if line.startswith("pretrained_model_name_or_path"))
    config.write_text(config.read_text().replace(base, f"pretrained_model_name_or_path: {tmp_path}/gone"))
    with pytest.raises(ConfigError, match=rf"pretrained_model_name_or_path '{tmp_path}/gone'.*in {config}: change it"):
        export(copied, out=tmp_path / "out")


def test_export_writes_layouts_beside_the_result(run: Callable[..., Path], tmp_path: Path):
    folder = run("lora")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    main(["export", str(folder), "--layout", "comfyui"])
    main(["export", str(folder), "--layout", "kohya", "--dtype", "fp16", "--out", str(tmp_path)])
    comfyui, kohya = load_file(folder / "lora-comfyui.safetensors"), load_file(tmp_path / "lora-kohya.safetensors")
    assert {tensor.dtype for tensor in comfyui.values()} == {torch.float32}
    assert {tensor.dtype for tensor in kohya.values()} == {torch.float16}
    trained = load_file(folder / LORA)
    name = "transformer.transformer_blocks.0.attn.to_out.0"
    update = trained[f"{name}.lora_B.weight"] @ trained[f"{name}.lora_A.weight"]
    original = "diffusion_model.double_blocks.0.img_attn.proj"
    torch.testing.assert_close(comfyui[f"{original}.lora_B.weight"] @ comfyui[f"{original}.lora_A.weight"], update)
    assert kohya["lora_unet_double_blocks_0_img_attn_qkv.alpha"] == 12, "three LoRAs of rank 4, of scale 1"
    (folder / "lora-comfyui.safetensors").unlink()
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


@pytest.mark.parametrize(("word", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_an_adapters_precision_on_disk(run: Callable[..., Path], word: str, dtype: torch.dtype, tmp_path: Path):
    """The file is the rounded adapter, whether training or `tread export` writes it; training itself is in float32."""
    exact = load_file(run("lora") / LORA)
    rounded = load_file(run(word, f"lora_dtype={word}") / LORA)
    main(["export", str(run("lora")), "--dtype", word, "--out", str(tmp_path / "out")])
    for found in (rounded, load_file(tmp_path / "out" / LORA)):
        assert found.keys() == exact.keys()
        assert all(torch.equal(tensor, exact[name].to(dtype)) for name, tensor in found.items())


def test_the_result_of_a_schedule_free_run_is_its_average(run: Callable[..., Path], tmp_path: Path):
    """A checkpoint has both weights: those that training goes on from, and the average, which is the result."""
    folder = run("free", "optimizer=adamw-schedule-free")
    path = folder / "checkpoints" / "step-00000002"
    trained, average = load_part(path, "model"), load_part(path, "ema")
    main(["export", str(folder), "--out", str(tmp_path)])
    assert any(not torch.equal(tensor, average[name]) for name, tensor in trained.items())
    for result in (load_file(folder / LORA), load_file(tmp_path / LORA)):
        named = {name.replace(".default", ""): tensor for name, tensor in average.items()}
        assert {name.removeprefix("transformer."): None for name in result}.keys() == named.keys()
        assert all(torch.equal(tensor, named[name.removeprefix("transformer.")]) for name, tensor in result.items())


@pytest.mark.parametrize(
    ("name", "settings", "options", "text"),
    [
        ("lora", [], ["--merge"], "name a folder for them with --out"),
        ("lora", [], ["--merge", "--layout", "kohya"], "ask for one after the other"),
        ("dora", ["use_dora=true"], ["--layout", "kohya"], "--layout kohya is for LoRAs, and this run trained a DoRA"),
        ("full", ["model_type=full"], ["--layout", "kohya"], "this run trained all weights: leave it out."),
        ("full", ["model_type=full"], ["--dtype", "bf16"], "--dtype is for adapters"),
        ("full", ["model_type=full"], ["--merge", "--out", "x"], "--merge is for adapters"),
    ],
)
def test_what_does_not_go_together(
    run: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    name: str,
    settings: list[str],
    options: list[str],
    text: str,
):
    folder = run(name, *settings)
    with pytest.raises(SystemExit):
        main(["export", str(folder), *options])
    assert text in capsys.readouterr().err
