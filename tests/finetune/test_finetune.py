"""`tread finetune` from the command line to the result, on tiny pipelines of every family."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock
from PIL import Image, ImageDraw
from safetensors.torch import load_file

from tests.finetune.tasks import ROUTES
from tests.forks import in_ranks
from tests.tiny.pictures import write_clips, write_shapes
from tests.tiny.pipelines import EVERY, SOME, TINY
from tests.tiny.runs import forget
from tread.cli import main
from tread.config.schema import parse
from tread.errors import ConfigError
from tread.finetune.config import read_config
from tread.finetune.families import family_class
from tread.finetune.run import finetune
from tread.finetune.settings import FinetuneConfig
from tread.kernels import checkpointing
from tread.training import memory
from tread.training.metrics import read_metrics
from tread.training.session import Session

pytestmark = pytest.mark.filterwarnings("ignore")
Folder = Callable[[str], Path]


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shapes(tmp_path_factory.mktemp("data") / "shapes")


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clips(tmp_path_factory.mktemp("data") / "clips")


@pytest.fixture(scope="session")
def config(pipeline_folder: Folder, shapes: Path, clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`config("flux", folder, key=value)`: six steps of a LoRA with routing."""
    cache = tmp_path_factory.mktemp("cache")

    def make(name: str, folder: Path, **changes: Any) -> FinetuneConfig:
        tiny = TINY[name]
        data: dict[str, Any] = {"instance_data_dir": str(shapes), "resolution": 64}
        if family_class(tiny.family).video:
            data = {"instance_data_dir": str(clips), "resolution": tiny.size[0], "video": {"num_frames": tiny.frames}}
        if tiny.reference:
            data |= {"conditioning_data_dir": [str(shapes)] * tiny.references, "conditioning_type": "reference"}
        settings = {
            "model_family": tiny.family,
            "pretrained_model_name_or_path": str(pipeline_folder(name)),
            "data": data,
            "output_dir": str(folder),
            "cache_dir": str(cache),
            "tokenizer_max_length": None if "edit" in name or tiny.one_length else 32,
            "max_train_steps": 6,
            "train_batch_size": 1 if tiny.one_length else 3,
            "gradient_accumulation_steps": 3 if tiny.one_length else 1,
            "learning_rate": 0.02,
            "mixed_precision": "no",
            "report_to": "none",
            "eval_steps_interval": 1,
            "num_eval_images": 2,
            "logging_steps": 1,
            "tread_config": ROUTES,
        }
        return parse(FinetuneConfig, settings | changes)

    return make


def val_losses(folder: Path) -> list[float]:
    return [line["val_loss"] for line in read_metrics(folder) if "val_loss" in line]


def checkpoint(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    return {path.stem: load_file(path) for path in newest.glob("*.safetensors")}


def assert_same(one: Path, two: Path) -> None:
    first, second = checkpoint(one), checkpoint(two)
    assert first.keys() == second.keys()
    for part, tensors in first.items():
        assert tensors.keys() == second[part].keys()
        assert all(torch.equal(tensor, second[part][name]) for name, tensor in tensors.items()), part
    losses = [[line["loss"] for line in read_metrics(folder) if "loss" in line] for folder in (one, two)]
    assert losses[0] == losses[1]


def test_changed_captions_and_eval_samples_need_the_user_s_word(config: Any, shapes: Path, tmp_path: Path) -> None:
    """As changed images do; a checkpoint of an earlier version does not know them and goes on."""
    train, held_out = (Path(shutil.copytree(shapes, tmp_path / name)) for name in ("train", "eval"))
    data = [{"instance_data_dir": str(train), "resolution": 64}, {"instance_data_dir": str(held_out), "resolution": 64}]
    data[1]["dataset_type"] = "eval"
    run, settings = tmp_path / "run", {"data": data, "eval_steps_interval": 0, "resume_from_checkpoint": "latest"}

    def go(steps: int, **changes: Any) -> None:
        finetune(config("flux", run, max_train_steps=steps, **settings, **changes))

    def refused(what: str) -> None:
        with pytest.raises(ConfigError) as error:
            go(2)
        words = rf"was saved: {what}\. Restore the data, or go on with data_changed=accept\."
        assert re.search(words, str(error.value)), error.value

    go(1)
    (train / "0.txt").write_text("a red disc")
    refused(r"'data\[0\]' has other captions")
    (held_out / "5.png").unlink()
    refused(
        r"'data\[1\]' has 5 held-out files instead of 6, 'data\[0\]' has other captions, 'data\[1\]' has 5 captions .*"
    )
    manifest = run / "checkpoints" / "step-00000001" / "checkpoint.json"
    kept = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({key: one for key, one in kept.items() if key not in ("captions", "held_out")}))
    go(2)
    (train / "0.txt").write_text("a red circle")
    go(3, data_changed="accept", num_eval_images=1)


def test_an_error_within_the_model_leaves_a_checkpoint_and_a_result(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It interrupts a routed window: what is written next must not meet the remains."""
    settings = {"eval_steps_interval": 0, "gradient_checkpointing": False}
    forward, steps = FluxSingleTransformerBlock.forward, []

    def fails(self: FluxSingleTransformerBlock, *arguments: Any, **named: Any) -> Any:
        if steps == [0, 1, 2, 3]:
            steps.clear()
            raise RuntimeError("out of luck")
        return forward(self, *arguments, **named)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of luck"):
        before = Session.step
        patch.setattr(Session, "step", lambda self, step, batches: (steps.append(step), before(self, step, batches))[1])
        patch.setattr(FluxSingleTransformerBlock, "forward", fails)
        finetune(config("flux", tmp_path / "run", **settings))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]
    assert "| tokens kept in routed layers | 50% |" in (tmp_path / "run" / "README.md").read_text()
    straight = finetune(config("flux", tmp_path / "straight", **settings))
    assert_same(straight, finetune(config("flux", tmp_path / "run", resume_from_checkpoint="latest", **settings)))


@pytest.mark.parametrize("name", EVERY)
def test_a_few_steps_lower_the_dense_loss(config: Any, tmp_path: Path, name: str) -> None:
    """On fixed samples, noise and times; the routed layers saw half of the tokens."""
    folder = finetune(config(name, tmp_path / "run", max_train_steps=9, eval_steps_interval=4, num_eval_images=6))
    losses = val_losses(folder)
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    kept = [line["tokens_kept"] for line in read_metrics(folder) if "loss" in line]
    if "first" in name:  # the first frame's tokens are forced
        assert all(0.5 < share < 1 for share in kept)
    else:  # references, as many tokens as the target each, are kept
        count = TINY[name].beside
        assert kept == pytest.approx([(0.5 + count) / (1 + count)] * 9, abs=0.05)
    assert (folder / "README.md").is_file()
    assert list(folder.glob("*.safetensors"))


@pytest.mark.parametrize("name", SOME)
def test_resume_is_exact(config: Any, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    straight = finetune(config(name, tmp_path / "straight", max_train_steps=4, use_ema=True))
    finetune(config(name, tmp_path / "resumed", max_train_steps=2, use_ema=True))
    resumed = finetune(
        config(name, tmp_path / "resumed", max_train_steps=4, use_ema=True, resume_from_checkpoint="latest")
    )
    assert_same(straight, resumed)
    assert f" {'clip' if TINY[name].frames > 1 else 'img'}/s" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "full", "learning_rate": 1e-3, "optimizer": "adamw-8bit"},
        {"lora_type": "lokr", "gradient_accumulation_steps": 2},
        {"base_model_precision": "int8"},
        {"tread_config": None, "loss_type": "huber", "gradient_checkpointing": False},
    ],
    ids=["full", "lokr", "int8", "dense"],
)
def test_resume_is_exact_with(config: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    straight = finetune(config("flux", tmp_path / "straight", max_train_steps=4, **changes))
    finetune(config("flux", tmp_path / "resumed", max_train_steps=2, **changes))
    again = config("flux", tmp_path / "resumed", max_train_steps=4, resume_from_checkpoint="latest", **changes)
    assert_same(straight, finetune(again))


def test_resume_is_exact_with_everything_that_is_drawn(config: Any, shapes: Path, tmp_path: Path) -> None:
    """Times, offsets, captions and tags, mirrored samples and weights: none of them has a state of its own."""
    place = {"instance_data_dir": str(shapes), "resolution": 64}
    entry = {"shuffle_tags": True, "tag_dropout": 0.3, "tag_separator": " ", "caption_variants": 4}
    data = [{**place, **entry, "horizontal_flip": True}, {**place, "loss_weight": 0.5, "trigger_word": ""}]
    changes = {"data": data, "trigger_word": "ohwx", "time_density": "beta", "loss_weighting": "cosmap"}
    changes |= {"noise_offset": 0.1, "noise_offset_probability": 0.5, "gradient_accumulation_steps": 2}
    straight = finetune(config("flux", tmp_path / "straight", max_train_steps=4, **changes))
    finetune(config("flux", tmp_path / "resumed", max_train_steps=2, **changes))
    again = config("flux", tmp_path / "resumed", max_train_steps=4, resume_from_checkpoint="latest", **changes)
    assert_same(straight, finetune(again))


def test_data_that_changed_needs_a_word(config: Any, shapes: Path, tmp_path: Path) -> None:
    data = shutil.copytree(shapes, tmp_path / "data")
    settings = {"data": {"instance_data_dir": str(data), "resolution": 64}, "max_train_steps": 1}
    finetune(config("flux", tmp_path / "run", **settings))
    picture = min(path for path in data.rglob("*") if path.suffix == ".png")
    for path in picture.parent.glob(f"{picture.stem}.*"):
        shutil.copy(path, path.with_stem("one-more"))
    settings |= {"max_train_steps": 2, "resume_from_checkpoint": "latest"}
    with pytest.raises(ConfigError, match=r"'data\[0\]' has \d+ files instead of .* go on with data_changed=accept"):
        finetune(config("flux", tmp_path / "run", **settings))
    finetune(config("flux", tmp_path / "run", data_changed="accept", **settings))


@pytest.mark.parametrize("how", [True, "selective", "dense"])
def test_checkpointing_changes_nothing(config: Any, tmp_path: Path, how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing, "LEAST", 1)  # the products of so small a model are dear too
    runs = (
        finetune(config("flux", tmp_path / str(setting), max_train_steps=3, gradient_checkpointing=setting))
        for setting in (False, how)
    )
    assert_same(*runs)


def test_init_then_finetune(
    pipeline_folder: Folder, shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The issue's own line: `tread init flux --model DIR --data DIR > c.yaml && tread finetune c.yaml`."""
    monkeypatch.chdir(tmp_path)
    main(["init", "flux", "--model", str(pipeline_folder("flux")), "--data", str(shapes)])
    Path("c.yaml").write_text(capsys.readouterr().out)
    run = Path(read_config("c.yaml").output_dir)
    small = ["max_train_steps=3", "mixed_precision=no", "validation_num_inference_steps=1", "num_eval_images=1"]
    main(["finetune", "c.yaml", *small, "validation_resolution=64", "compile=false"])
    made = {path.name for path in run.iterdir()}
    assert {"README.md", "config.yaml", "metrics.jsonl", "pytorch_lora_weights.safetensors", "previews"} <= made
    assert [path.name for path in (run / "previews").iterdir()] == ["step-00000003-0.png"]


def test_the_end_names_what_was_made(config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a CPU computes in float32 unless told otherwise: bf16 would be far slower."""
    settings = {"mixed_precision": "auto", "validation_prompt": "a square", "validation_num_inference_steps": 1}
    folder = finetune(config("flux", tmp_path / "run", max_train_steps=1, **settings))
    said = capsys.readouterr().out.splitlines()
    assert f"result: {folder / 'pytorch_lora_weights.safetensors'}" in said
    assert said[-1] == f"newest preview: {folder / 'previews' / 'step-00000001-0.png'}"
    assert yaml.safe_load((folder / "config.yaml").read_text())["mixed_precision"] == "no"
    record = json.loads((folder / "run.json").read_text())
    assert not {"contents", "held_out", "captions"} & record["facts"].keys(), "they are for a resume, in checkpoints"
    assert (" GiB of host memory" in record["summary"]) == memory.STATUS.is_file(), "a system that tells its memory"


def test_a_base_in_bf16_is_computed_in_bf16_on_a_cpu_too(config: Any, tmp_path: Path) -> None:
    settings = {"mixed_precision": "auto", "base_model_precision": "bf16"}
    forget()
    folder = finetune(config("flux", tmp_path / "run", max_train_steps=2, **settings))
    forget()
    kept = yaml.safe_load((folder / "config.yaml").read_text())
    assert (kept["mixed_precision"], kept["base_model_precision"]) == ("bf16", "bf16")
    assert all(line["loss"] > 0 for line in read_metrics(folder) if "loss" in line)


def test_adam_epsilon_reaches_the_optimizer(config: Any, tmp_path: Path) -> None:
    """The first step of AdamW without decay is rate * g / (|g| + eps), which is g / eps where eps is large."""
    steps = {}
    for epsilon in (1e3, 2e3):
        settings = {"adam_epsilon": epsilon, "adam_weight_decay": 0, "max_grad_norm": 0, "eval_steps_interval": 0}
        folder = finetune(config("flux", tmp_path / str(epsilon), max_train_steps=1, **settings))
        steps[epsilon] = {name: one for name, one in checkpoint(folder)["model"].items() if "lora_B" in name}
    for name, step in steps[1e3].items():  # these matrices start at zero
        assert step.abs().max() > 0
        torch.testing.assert_close(step, 2 * steps[2e3][name], rtol=1e-3, atol=0)


def test_one_run_for_any_number_of_processes(config: Any, tmp_path: Path) -> None:
    """Two processes of one sample each train as one process of two; both experts, so that some weights wait."""
    alone = config("wan-a14b", tmp_path / "alone", max_train_steps=4, train_batch_size=2)
    finetune(alone)
    raw = {**json.loads(json.dumps(alone.__dict__)), "output_dir": str(tmp_path / "two"), "train_batch_size": 1}
    (tmp_path / "c.json").write_text(json.dumps(raw))
    in_ranks(main, ["finetune", str(tmp_path / "c.json")])
    losses = [[line["loss"] for line in read_metrics(tmp_path / name) if "loss" in line] for name in ("alone", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    one, two = checkpoint(tmp_path / "alone"), checkpoint(tmp_path / "two")
    for name, tensor in one["model"].items():  # Adam makes steps of 0.02 out of gradients of any size
        torch.testing.assert_close(tensor, two["model"][name], rtol=1e-3, atol=1e-3, msg=name)


def test_masks_force_what_carries_loss(config: Any, shapes: Path, tmp_path: Path) -> None:
    """A mask of the left half: its tokens are kept, so at ratio 0.5 three quarters of the tokens are."""
    masks = tmp_path / "masks"
    masks.mkdir()
    for path in shapes.glob("*.png"):
        mask = Image.new("L", (128, 128))
        ImageDraw.Draw(mask).rectangle((0, 0, 63, 127), fill=255)
        mask.save(masks / f"{path.stem}.png")
    data = {"instance_data_dir": str(shapes), "resolution": 64, "conditioning_data_dir": str(masks)}
    folder = finetune(config("flux", tmp_path / "run", data={**data, "conditioning_type": "mask"}))
    kept = [line["tokens_kept"] for line in read_metrics(folder) if "loss" in line]
    assert kept == [0.75] * 6
    assert "| tokens kept in routed layers | 75% |" in (folder / "README.md").read_text()


def refused(call: Callable[[], object]) -> str:
    with pytest.raises((ConfigError, ValueError)) as error:
        call()
    return str(error.value)


def test_mistakes_are_said_in_a_sentence(config: Any, tmp_path: Path, pipeline_folder: Folder) -> None:
    text = refused(lambda: finetune(config("flux", tmp_path / "a", pretrained_model_name_or_path=str(tmp_path))))
    assert text == (
        f"no model at pretrained_model_name_or_path {str(tmp_path)!r}: give a folder in diffusers format (it has "
        "model_index.json), or the id of a model on the hub that this machine can reach."
    )
    text = refused(lambda: finetune(config("flux", tmp_path / "b", model_family="sd3")))
    assert "is a FluxPipeline: set model_family to 'flux'" in text
    (tmp_path / "empty").mkdir()
    text = refused(lambda: finetune(config("flux", tmp_path / "c", data=str(tmp_path / "empty"))))
    assert str(tmp_path / "empty") in text
    text = refused(lambda: finetune(config("flux", tmp_path / "d", lora_targets=["to_x"])))
    assert "lora_targets names 'to_x', which is no linear of FluxTransformer2DModel" in text
    outside = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": 9}]}
    text = refused(lambda: finetune(config("flux", tmp_path / "f", tread_config=outside, data="nowhere")))
    assert text.startswith("end_layer_idx 9 of route 2..9 at 0.5 is outside a model of 5 layers")  # before the data
    finetune(config("flux", tmp_path / "e", max_train_steps=1))
    text = refused(lambda: finetune(config("flux", tmp_path / "e", max_train_steps=2)))
    assert text.endswith("continue it with resume_from_checkpoint=latest, or name another output_dir.")
