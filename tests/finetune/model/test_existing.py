"""`init_lora`: a run starts as the adapter it is given, whatever its names, its alpha and its precision."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.finetune.model.test_adapters import trainable
from tests.finetune.result.load_result import answer
from tests.finetune.result.test_export_forms import LORA, run
from tests.finetune.result.test_output import make_config, stock_call
from tests.finetune.trained import drawn
from tread.cli import main
from tread.errors import ConfigError, TreadWarning
from tread.finetune.families import open_family
from tread.finetune.family import TuneFamily
from tread.finetune.model.adapters import add_adapter
from tread.finetune.model.source import Source
from tread.finetune.preflight import look
from tread.finetune.result.layout import write_layout
from tread.finetune.result.write import write_result
from tread.finetune.run import load_stock, make_trainable
from tread.finetune.settings import FinetuneConfig

pytestmark = pytest.mark.filterwarnings("ignore")
Folder = Callable[[str], Path]
__all__ = ["run"]
PLAIN = {"gradient_checkpointing": False, "compile": False, "mixed_precision": "no"}


def opened(place: Path, name: str, kind: str = "standard", **changes: Any) -> tuple[TuneFamily, FinetuneConfig]:
    config = make_config(place, name, kind, **PLAIN, **changes)
    return open_family(config.model_family, Source(str(place))), config


@torch.no_grad()
def trained(family: TuneFamily, config: FinetuneConfig, part: str = "transformer") -> nn.Module:
    """A transformer with an adapter that does something; alpha / rank is 6 / 4."""
    model = family.source.transformer(part, dtype=torch.float32)
    settings: dict[str, Any] = {"rank": 4, "alpha": 6, "targets": family.lora_targets, "seed": 7}
    add_adapter(model, kind=config.lora_type, dora=config.use_dora, factor=config.lokr_factor, **settings)
    for seed, parameter in enumerate(trainable(model).values()):
        parameter.add_(0.1 * drawn(*parameter.shape, seed=seed))
    return model.eval()


def started(family: TuneFamily, config: FinetuneConfig, part: str = "transformer") -> nn.Module:
    """The transformer as a run begins with it."""
    return make_trainable(config, family, part, load_stock(config, family, part), torch.device("cpu")).eval()


@torch.no_grad()
def answers(family: TuneFamily, name: str, *models: nn.Module) -> list[Tensor]:
    call = stock_call(family, name)
    return [answer(model, call) for model in models]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("flux", "standard"), ("flux", "dora"), ("flux", "lokr"), ("pixart_sigma", "standard"), ("prx", "lokr")],
)
def test_a_result_is_gone_on_with(name: str, kind: str, pipeline_folder: Folder, tmp_path: Path):
    """PixArt and PRX have peft's folders; all of it with another alpha, and from a file in bf16."""
    family, config = opened(pipeline_folder(name), name, kind)
    model = trained(family, config)
    write_result(tmp_path / "exact", family, {"transformer": model}, config, {"step": 1})
    _, other = opened(pipeline_folder(name), name, kind, init_lora=str(tmp_path / "exact"), lora_alpha=1.5)
    expected, found, base = answers(
        family, name, model, started(family, other), load_stock(other, family, "transformer")
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (expected - base).abs().max() > 1e-3


@pytest.mark.parametrize("layout", ["comfyui", "kohya"])
@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_other_programs_names(layout: Any, name: str, pipeline_folder: Folder, tmp_path: Path):
    family, config = opened(pipeline_folder(name), name)
    model = trained(family, config)
    (path,) = write_layout(tmp_path, layout, {"transformer": model}, config, {"step": 1})
    _, other = opened(pipeline_folder(name), name, init_lora=str(path))
    expected, found = answers(family, name, model, started(family, other))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_names_that_the_stock_loader_knows(pipeline_folder: Folder, tmp_path: Path):
    """XLabs' names for the queries, keys and values of FLUX's first blocks, which no table here has."""
    family, config = opened(pipeline_folder("flux"), "flux", lora_targets=tuple(f"attn.to_{name}" for name in "qkv"))
    width = family.source.transformer("transformer", dtype=torch.float32).get_parameter("x_embedder.bias").shape[0]
    down, up = drawn(4, width), drawn(3 * width, 4, seed=1)
    key = "double_blocks.0.processor.qkv_lora1"
    save_file({f"{key}.down.weight": down, f"{key}.up.weight": up}, tmp_path / "xlabs.safetensors")
    _, other = opened(
        pipeline_folder("flux"), "flux", init_lora=str(tmp_path / "xlabs.safetensors"), lora_targets=config.lora_targets
    )
    with pytest.warns(TreadWarning, match=r"has nothing for \d+ of \d+ linears, which start as nothing"):
        model = started(family, other)
    stock = load_stock(other, family, "transformer").eval()
    with torch.no_grad():
        for name, rows in zip("qkv", up.chunk(3), strict=True):
            stock.get_parameter(f"transformer_blocks.0.attn.to_{name}.weight").add_(rows @ down)
    expected, found = answers(family, "flux", stock, model)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_alphas_in_a_file_and_half_precision(pipeline_folder: Folder, tmp_path: Path):
    """As some trainers write it: diffusers' names with an alpha beside each pair, in bf16."""
    family, config = opened(pipeline_folder("flux"), "flux", lora_dtype="bf16")
    model = trained(family, config)
    write_result(tmp_path / "run", family, {"transformer": model}, config, {"step": 1})
    tensors = load_file(tmp_path / "run" / LORA)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    alphas = {key.replace("lora_A.weight", "alpha"): torch.tensor(6.0) for key in tensors if "lora_A" in key}
    save_file({**tensors, **alphas}, tmp_path / "file.safetensors")
    _, other = opened(pipeline_folder("flux"), "flux", init_lora=str(tmp_path / "file.safetensors"))
    expected, found = answers(family, "flux", model, started(family, other))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_both_experts_have_a_file(pipeline_folder: Folder, tmp_path: Path):
    place = pipeline_folder("wan-a14b")
    family, config = opened(place, "wan-a14b")
    models = {part: trained(family, config, part) for part in ("transformer", "transformer_2")}
    with torch.no_grad():
        next(iter(trainable(models["transformer_2"]).values())).add_(0.3)
    write_result(tmp_path, family, models, config, {"step": 1})
    _, other = opened(place, "wan-a14b", init_lora=str(tmp_path))
    for part, model in models.items():
        expected, found = answers(family, "wan-a14b", model, started(family, other, part))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    _, alone = opened(place, "wan-a14b", init_lora=str(tmp_path / LORA))
    with pytest.raises(ConfigError, match="but two transformers are trained: name a folder"):
        started(family, alone, "transformer_2")


@pytest.fixture(scope="module")
def lora(pipeline_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a LoRA of rank 4 for FLUX."""
    folder = tmp_path_factory.mktemp("lora")
    family, config = opened(pipeline_folder("flux"), "flux")
    write_result(folder, family, {"transformer": trained(family, config)}, config, {"step": 1})
    return folder / LORA


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"lora_rank": 16}, "has rank 4, but lora_rank is 16: set lora_rank to 4"),
        ({"lora_targets": ("attn.to_q",)}, "linears that are not trained here, .* name them in lora_targets too"),
        ({"use_dora": True}, "is a LoRA without magnitudes: set use_dora to false"),
        ({"lora_type": "lokr"}, "set lora_type, lora_rank, lokr_factor and lora_targets as that adapter was trained"),
        ({"init_lora": "nowhere/at/all"}, "neither a file nor a folder here, nor an adapter on the hub"),
        ({"init_lora": __file__}, "is no safetensors file"),
    ],
)
def test_what_cannot_be_gone_on_with(
    lora: Path, pipeline_folder: Folder, changes: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    family, config = opened(pipeline_folder("flux"), "flux", **{"init_lora": str(lora), **changes})
    with pytest.raises(ConfigError, match=text) as error:
        started(family, config)
    assert len(str(error.value)) < 500


def test_an_adapter_of_another_model(lora: Path, pipeline_folder: Folder, tmp_path: Path):
    family, config = opened(pipeline_folder("flux"), "flux", init_lora=str(tmp_path / "wide.safetensors"))
    wide = {name: torch.cat([t, t], 1) if "lora_A" in name else t for name, t in load_file(lora).items()}
    save_file(wide, tmp_path / "wide.safetensors")
    with pytest.raises(ConfigError, match="it is an adapter of another model"):
        started(family, config)
    several = {f"a{i}.safetensors": {"x": torch.ones(1)} for i in range(2)}
    for name, tensors in several.items():
        (tmp_path / "several").mkdir(exist_ok=True)
        save_file(tensors, tmp_path / "several" / name)
    _, config = opened(pipeline_folder("flux"), "flux", init_lora=str(tmp_path / "several"))
    with pytest.raises(ConfigError, match=r"its safetensors files are: a0.safetensors, a1.safetensors. Name the file"):
        started(family, config)


def test_check_reads_it_before_anything_is_encoded(lora: Path, pipeline_folder: Folder):
    _, config = opened(pipeline_folder("flux"), "flux", init_lora=str(lora), lora_rank=8)
    assert any("has rank 4, but lora_rank is 8" in problem for problem in look(config).problems)
    _, config = opened(pipeline_folder("flux"), "flux", init_lora="someone/some-lora")
    assert (
        "the adapter init_lora 'someone/some-lora' is not on this disk: a run downloads it first" in look(config).unseen
    )


def test_a_run_goes_on_without_the_file_it_began_with(run: Callable[..., Path], lora: Path, tmp_path: Path):
    """Its checkpoints have the adapter; and at a tiny rate it stays the one it began with."""
    begun = tmp_path / "begun.safetensors"
    begun.write_bytes(lora.read_bytes())
    tiny = ["lora_alpha=6", "learning_rate=1e-12", "adam_weight_decay=0", "resume_from_checkpoint=latest"]
    folder = run("begun", f"init_lora={begun}", *tiny)
    expected, found = load_file(lora), load_file(folder / LORA)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    begun.unlink()
    main(["finetune", str(folder / "config.yaml"), "resume_from_checkpoint=latest", "max_train_steps=3"])
    main(["export", str(folder), "--out", str(tmp_path / "out")])
    assert json.loads((tmp_path / "out" / "result.json").read_text())["step"] == 3


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"use_dora": True, "lora_type": "lokr"}, "use_dora is true, but lora_type is 'lokr'"),
        ({"use_dora": True, "model_type": "full"}, "use_dora is true, but model_type is 'full'"),
        ({"init_lora": "x", "model_type": "full"}, "init_lora is 'x', but model_type is 'full'"),
    ],
)
def test_settings_that_do_not_go_together(given: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=text):
        FinetuneConfig(model_family="flux", pretrained_model_name_or_path="m", data="d", **given)
