"""`tread doctor CONFIG` end to end on tiny models: what it prints, what it writes, and what it exits with."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.report.conftest import Tune
from tests.tiny.pipelines import PipelineFolder
from tests.tiny.runs import TINY, write_latents
from tread.attach import registry
from tread.attach.attach import ModelCall
from tread.attach.families.flux import FLUX
from tread.cli import main
from tread.config.fields import fields_of
from tread.config.jobs import SHARED, TRAIN_SECTIONS
from tread.finetune.settings import FinetuneConfig
from tread.pretrain.settings import PretrainConfig
from tread.report.doctor import is_finetune

pytestmark = pytest.mark.filterwarnings("ignore")
Capture = pytest.CaptureFixture[str]


def doctor(*arguments: str) -> int:
    """The exit status of a call."""
    try:
        main(["doctor", *arguments])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def written(config: dict[str, Any], path: Path = Path("c.json")) -> str:
    path.write_text(json.dumps(config))
    return str(path)


def test_a_config_of_train(capsys: Capture, tmp_path: Path) -> None:
    """A recipe of latents, with settings over it, as JSON."""
    (tmp_path / "r.yaml").write_text("data: latents\nmodel: {name: tread, size: S/2}\noutput_dir: run\n")
    write_latents(tmp_path / "shards" / "0.tar")
    settings = [*TINY, "data.path=shards", "data.num_classes=3", "model.patch=1", "evaluate.every=1", "sample.vae=none"]
    assert doctor("--json", "r.yaml", *settings) == 0
    report = json.loads(capsys.readouterr().out)
    assert [finding["name"] for finding in report["machine"]][:3] == ["python", "tread", "torch"]
    assert report["config"]["problems"] == []
    (network,) = report["config"]["networks"]
    off, permuted = network["comparisons"]
    assert (off["what"], off["difference"]) == ("attached, dense", 0)
    assert permuted["what"] == "routed, tokens permuted"
    assert permuted["difference"] < 1e-5
    assert network["dense"]["finite"]
    assert network["routed"]["finite"]
    assert network["dense"]["loss"] == pytest.approx(network["eager_loss"])
    assert (network["tokens"], network["kept"], network["kept_share"]) == (16, [8], 0.5)
    assert 1 < network["flop_ratio"] < 2
    assert not Path("run").exists()


def test_no_routes_no_routed_step(capsys: Capture) -> None:
    assert doctor(*TINY, "model.tread_config=null", "objective=edm") == 0
    shown = capsys.readouterr().out
    assert "  routed step      none: the config has no tread_config" in shown
    assert shown.endswith("\nit works\n")


def test_a_config_of_finetune(capsys: Capture, tune: Tune) -> None:
    """Two of six images are encoded, in a cache that goes; the run's folder is not made."""
    config = written(tune("flux"))
    before = sorted(Path().rglob("*"))
    assert doctor(config) == 0
    assert sorted(Path().rglob("*")) == before
    shown = capsys.readouterr().out
    assert "c.json, on one batch: flux, lora: " in shown
    assert "  prediction adapted                  equal to the stock model's, bit for bit\n" in shown
    assert "  prediction attached, dense          equal to the stock model's, bit for bit\n" in shown
    assert "  tokens kept                         50% in the routed layers (8 of 16)\n" in shown
    assert "step times mean little" in shown
    assert shown.endswith("\nit works\n")


def test_a_cache_that_exists_is_used(tune: Tune) -> None:
    Path("cache").mkdir()
    assert doctor(written(tune("sd3")), "base_model_precision=int8") == 0
    assert len(list(Path("cache").glob("latents/*/*.safetensors"))) == 2
    assert len(list(Path("cache").glob("text/*/*.safetensors"))) == 3  # two captions, and none for dropped ones


def test_each_of_two_transformers(capsys: Capture, tune: Tune) -> None:
    assert doctor("--json", written(tune("wan-a14b", base_model_precision="int4"))) == 0
    networks = json.loads(capsys.readouterr().out)["config"]["networks"]
    assert [network["part"] for network in networks] == ["transformer", "transformer_2"]
    assert networks[0]["dense"]["loss"] != networks[1]["dense"]["loss"]
    for network in networks:
        quantized, off, permuted = network["comparisons"]
        assert (quantized["what"], quantized["beside"], quantized["limit"]) == ("quantized", "stock", None)
        assert 1e-3 < quantized["difference"] < 1
        assert (off["beside"], off["difference"]) == ("quantized", 0)
        assert permuted["difference"] < 1e-5
        assert network["routed"]["finite"]


def test_a_family_that_leaves_rope_behind(capsys: Capture, tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropped tokens or not, each token would be rotated by the position of another."""
    bare = replace(FLUX, stacks=tuple(replace(stack, sides=()) for stack in FLUX.stacks))
    monkeypatch.setattr(registry, "FAMILIES", (bare,))
    assert doctor(written(tune("flux"))) == 1
    shown = capsys.readouterr().out
    assert "  prediction attached, dense          equal to the stock model's, bit for bit\n" in shown
    assert "DIFFERENT: allowed is 0.0001\n" in shown
    assert "  steps                               not run, because a prediction is wrong\n" in shown
    assert "it does not work: the transformer's prediction routed, tokens permuted differs from" in shown


def test_an_attached_forward_that_differs(tune: Tune, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    call = ModelCall.call
    monkeypatch.setattr(ModelCall, "call", lambda *arguments: (call(*arguments)[0] * 1.01,))
    assert doctor("--json", written(tune("flux"))) == 1
    (network,) = json.loads(capsys.readouterr().out)["config"]["networks"]
    differences = {one["what"]: one["difference"] for one in network["comparisons"]}
    assert differences["adapted"] == 0
    assert differences["attached, dense"] == pytest.approx(0.01, rel=1e-3)
    assert network["dense"] is None


def test_weights_that_are_not_numbers(tune: Tune, pipeline_folder: PipelineFolder, capsys: Capture) -> None:
    shutil.copytree(pipeline_folder("flux"), "torn")
    file = Path("torn/transformer/diffusion_pytorch_model.safetensors")
    weights = load_file(file)
    weights["proj_out.bias"][3] = torch.nan
    save_file(weights, file, {"format": "pt"})
    assert doctor("--json", written(tune("flux", pretrained_model_name_or_path="torn"))) == 1
    report = json.loads(capsys.readouterr().out)["config"]
    assert report["problems"][0] == "the transformer's prediction adapted is not finite"
    assert report["networks"][0]["comparisons"][0]["difference"] is None


def test_a_step_that_is_not_finite(capsys: Capture) -> None:
    assert doctor(*TINY, "optimizer.learning_rate=1e30", "optimizer.warmup_steps=0") == 1
    assert "it does not work: the dense step of the model is not finite" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "settings", "sentence"),
    [
        (None, [], "the config file 'c.json' does not exist"),
        ({"model": {"size": "S/2"}, "tarin": {}}, [], "there is no setting tarin. Did you mean 'train'?"),
        (
            {"model_family": "flux", "data": "x"},
            ["model_family=fluxx"],
            'model_family is "fluxx": tread finetune has auraflow',
        ),
        ({"routes": []}, [], "c.json is no config of a job: one of `tread finetune` has model_family"),
        ([1], [], "c.json is not a mapping of settings"),
        ({"train": {}}, ["steps"], "cannot read 'steps': write name=value"),
    ],
    ids=["missing", "key", "family", "routes", "list", "setting"],
)
def test_a_mistake_is_one_sentence(content: Any, settings: list[str], sentence: str, capsys: Capture) -> None:
    if content is not None:
        if isinstance(content, dict) and "model_family" in content:
            content = content | {"pretrained_model_name_or_path": "nowhere"}
        Path("c.json").write_text(json.dumps(content))
    assert doctor("c.json", *settings) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("tread doctor: ")
    assert sentence in shown.err
    assert shown.err.count("\n") == 1


def test_what_cannot_be_tried_keeps_the_machine_in_json(capsys: Capture, tune: Tune) -> None:
    config = written(tune("flux", data={"instance_data_dir": "nowhere"}))
    assert doctor("--json", config) == 2
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert "nowhere" in report["error"]
    assert report["machine"]
    assert f"tread doctor: {report['error']}\n" in shown.err


def test_configs_are_told_apart() -> None:
    recipes = Path(__file__).parents[2] / "recipes"
    for path in sorted([*recipes.glob("*.yaml"), *recipes.glob("finetune/*.yaml")]):
        assert is_finetune(str(path)) == (path.parent.name == "finetune"), path
    Path("other.json").write_text('{"--model_family": "flux", "--optimizer": "adamw_bf16"}')
    assert is_finetune("other.json")
    Path("train.json").write_text('{"data": {"name": "digits"}, "optimizer": {"warmup_steps": 0}}')
    assert not is_finetune("train.json")
    Path("config.env").write_text("export FLUX=true")
    assert is_finetune("config.env")


def test_sections_of_a_train_config_are_no_keys_of_a_finetune() -> None:
    sections = {*fields_of(PretrainConfig)}
    assert sections <= {*TRAIN_SECTIONS, *SHARED}
    assert not {*TRAIN_SECTIONS} & {*fields_of(FinetuneConfig)}
    assert {*SHARED} == sections & {*fields_of(FinetuneConfig)}
