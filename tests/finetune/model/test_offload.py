"""`offload` of a fine-tune: the run is the same bit for bit, resumes, draws, and writes the same result."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.finetune.tasks import make_config
from tests.tiny.pictures import write_noise
from tests.tiny.pipelines import PipelineFolder
from tread.attach.registry import layers_of
from tread.config.schema import parse, plain
from tread.errors import ConfigError
from tread.finetune.job import FinetuneJob
from tread.finetune.result.export import export
from tread.finetune.run import finetune, load_models, open_job
from tread.finetune.settings import FinetuneConfig
from tread.finetune.trial import try_finetune
from tread.kernels.offload.call import is_offloaded
from tread.kernels.offload.memory import ALLOCATOR
from tread.training.metrics import read_metrics

pytestmark = pytest.mark.filterwarnings("ignore")
ROUTES = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": -2}]}


@pytest.fixture
def config(pipeline_folder: PipelineFolder, tmp_path: Path) -> FinetuneConfig:
    """Three routed steps of a LoRA on FLUX, validated and drawn after each."""
    settings: dict[str, Any] = {
        "output_dir": str(tmp_path / "run"),
        "cache_dir": str(tmp_path / "cache"),
        "max_train_steps": 3,
        "learning_rate": 0.02,
        "lora_dropout": 0.2,
        "report_to": "none",
        "logging_steps": 1,
        "eval_steps_interval": 1,
        "checkpoint_step_interval": 1,
        "tread_config": ROUTES,
    }
    return make_config(pipeline_folder("flux"), write_noise(tmp_path / "images"), **settings)


def run(config: FinetuneConfig, name: str, **settings: Any) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """The adapter that a run leaves, and its losses."""
    folder = finetune(replace(config, output_dir=str(Path(config.output_dir).parent / name), **settings))
    losses = [
        (line["step"], name, line[name])
        for line in read_metrics(folder)
        for name in ("loss", "val_loss")
        if name in line
    ]
    return load_file(next(folder.glob("**/pytorch_lora_weights.safetensors"))), losses


def assert_same(found: Any, expected: Any) -> None:
    assert found[1] == expected[1]
    assert found[0].keys() == expected[0].keys()
    assert all(torch.equal(found[0][name], expected[0][name]) for name in expected[0])


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"offload": 2, "base_model_precision": "int8"}, id="quantized"),
        pytest.param({"offload": 5, "tread_config": None}, id="dense"),
        pytest.param({"offload": 5, "gradient_checkpointing": False, "use_ema": True}, id="not-checkpointed"),
    ],
)
def test_the_run_is_the_same(config: FinetuneConfig, settings: dict[str, Any]) -> None:
    assert_same(run(config, "offloaded", **settings), run(config, "plain", **{**settings, "offload": "none"}))


def test_a_stopped_run_goes_on(config: FinetuneConfig) -> None:
    """With previews in between, and however its layers are kept."""
    drawn = {"validation_prompt": "picture 1", "validation_num_inference_steps": 2, "validation_resolution": 64}
    config = replace(config, validation_steps=1, validation_guidance=1.0, **drawn)
    expected = run(config, "whole", offload="none")
    run(config, "parts", offload=5, max_train_steps=2)
    found = run(config, "parts", offload=3, resume_from_checkpoint="latest")
    assert_same(found, expected)
    parent = Path(config.output_dir).parent
    for path in (parent / "whole" / "previews").glob("*.png"):
        assert path.read_bytes() == (parent / "parts" / "previews" / path.name).read_bytes()


def test_the_merged_result_is_the_same(config: FinetuneConfig) -> None:
    made = []
    for name, offload in (("offloaded", 5), ("plain", "none")):
        run(config, name, offload=offload)
        folder = Path(config.output_dir).parent / name
        export(folder, out=folder / "merged", merge=True)
        made.append(load_file(next((folder / "merged").glob("**/diffusion_pytorch_model.safetensors"))))
    assert made[0].keys() == made[1].keys()
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


def test_a_quantized_base_is_offloaded_as_it_is(config: FinetuneConfig) -> None:
    config, family, accelerator = open_job(replace(config, offload=5, base_model_precision="int4"))
    model = load_models(config, family, accelerator.device)["transformer"]
    assert all(is_offloaded(layer) for layer in layers_of(model))
    assert any(buffer.dtype == torch.uint8 for buffer in model.buffers())


@pytest.mark.contract
def test_the_doctor_tries_it(config: FinetuneConfig, tmp_path: Path) -> None:
    _, (trial,) = try_finetune(replace(config, offload=5), tmp_path / "trial")
    assert all(one.fits for one in trial.comparisons)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "full"}, "only frozen weights can wait in host memory"),
        ({"parallel": "fsdp"}, "which moves the weights itself"),
        ({"base_model_precision": "int8-bnb"}, "use 'int8', or 'nf4'"),
        ({"lora_type": "lycoris", "lycoris_config": {"algo": "lora"}}, "whose weights are not in the layers"),
        ({"offload": -1}, "give a number of layers, 'auto' or 'none'"),
        ({"offload": "some"}, "offload is 'some'; it must be"),
    ],
)
def test_what_does_not_go_together(config: FinetuneConfig, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(FinetuneConfig, json.loads(json.dumps(plain(config))) | {"offload": "auto"} | settings)


def test_too_little_memory_is_answered_with_it(config: FinetuneConfig) -> None:
    assert "set offload to 'auto'" in FinetuneJob.of(config).memory_advice
    assert "offload" not in FinetuneJob.of(replace(config, offload="auto")).memory_advice


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the allocator's, and as before afterwards."""
    for name in ALLOCATOR:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_settings")
@pytest.mark.parametrize(("offload", "found"), [("auto", "expandable_segments:True"), ("none", None)])
def test_the_allocator_is_told_before_the_gpu_is_used(config: FinetuneConfig, offload: Any, found: str | None) -> None:
    with pytest.raises(ConfigError, match="no-such-folder"):
        finetune(replace(config, pretrained_model_name_or_path="/no-such-folder", offload=offload))
    assert os.environ.get(ALLOCATOR[0]) == found


@pytest.mark.usefixtures("no_settings")
@pytest.mark.parametrize("name", ALLOCATOR)
def test_settings_of_the_users_own_are_left_alone(
    config: FinetuneConfig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:128")
    with pytest.raises(ConfigError, match="no-such-folder"):
        finetune(replace(config, pretrained_model_name_or_path="/no-such-folder", offload="auto"))
    assert {one: os.environ[one] for one in ALLOCATOR if one in os.environ} == {name: "max_split_size_mb:128"}
