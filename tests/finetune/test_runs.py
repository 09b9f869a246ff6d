"""Runs: what the untouched model draws, the best checkpoint, steps of several buckets, the upload of a result."""

import base64
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.finetune.tasks import make_config, make_task
from tests.tiny.pictures import write_noise
from tests.tiny.pipelines import PipelineFolder
from tread.errors import ConfigError
from tread.finetune.job import FinetuneJob
from tread.finetune.loss import Draws
from tread.finetune.model.source import Source
from tread.finetune.preflight import look
from tread.finetune.result.export import export
from tread.finetune.run import finetune
from tread.finetune.settings import FinetuneConfig
from tread.finetune.task import Finetuning
from tread.routing import noise
from tread.training import checkpoint
from tread.training.metrics import read_metrics
from tread.training.session import Session

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def config(pipeline_folder: PipelineFolder, tmp_path: Path) -> FinetuneConfig:
    """Two steps of a LoRA on four squares and two wide pictures."""
    settings: dict[str, Any] = {
        "output_dir": str(tmp_path / "run"),
        "max_train_steps": 2,
        "learning_rate": 0.02,
        "report_to": "none",
        "logging_steps": 1,
        "eval_steps_interval": 1,
    }
    return make_config(pipeline_folder("flux"), write_noise(tmp_path / "images"), **settings)


PREVIEWS = {"validation_num_inference_steps": 2, "validation_guidance": 1.0, "validation_resolution": 64}


@pytest.mark.parametrize("model_type", ["lora", pytest.param("full", marks=pytest.mark.contract)])
def test_the_first_preview_is_the_untouched_model_s(config: FinetuneConfig, model_type: Any) -> None:
    """Its picture is what the stock pipeline draws of the base, and its loss is that of the base."""
    asked = {"validation_prompt": ("picture 1", "[trigger] at sea"), "trigger_word": "a fox", "model_type": model_type}
    folder = finetune(replace(config, validation_on_startup=True, use_ema=True, **asked, **PREVIEWS))
    drawn = sorted(path.name for path in (folder / "previews").glob("*.png"))
    assert drawn == [f"step-0000000{step}-{number}.png" for step in (0, 2) for number in (0, 1)]

    source = Source(config.pretrained_model_name_or_path)
    pipeline: Any = source.pipeline(*source.parts)
    pipeline.set_progress_bar_config(disable=True)
    for number, prompt in enumerate(("picture 1", "a fox at sea")):
        stock = pipeline(
            prompt,
            width=64,
            height=64,
            num_inference_steps=2,
            guidance_scale=1.0,
            generator=torch.Generator("cpu").manual_seed(config.validation_seed),
        ).images[0]
        with Image.open(folder / "previews" / f"step-00000000-{number}.png") as image:
            assert np.abs(np.asarray(image, dtype=int) - np.asarray(stock, dtype=int)).max() <= 1, "of 255"
    losses = [(line["step"], line["val_loss"]) for line in read_metrics(folder) if "val_loss" in line]
    assert [step for step, _ in losses] == [0, 1, 2]
    task = make_task(replace(config, trigger_word="a fox"), folder)
    task.model.eval()
    assert losses[0][1] == pytest.approx(task.validate()["val_loss"], rel=1e-6)


def test_nothing_is_drawn_before_the_first_step_nor_uploaded_unless_asked(config: FinetuneConfig, hub: "Hub") -> None:
    folder = finetune(replace(config, validation_prompt="a fox", **PREVIEWS))
    assert [path.name for path in (folder / "previews").glob("*.png")] == ["step-00000002-0.png"]
    assert [line["step"] for line in read_metrics(folder) if "val_loss" in line] == [1, 2]
    assert hub.asked == []


def test_a_run_that_begins_again_validates_again(config: FinetuneConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before its first checkpoint: the metrics read as if it had not been."""
    config = replace(config, validation_on_startup=True, resume_from_checkpoint="latest")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Session, "step", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        finetune(config)
    folder = finetune(config)
    assert [line["step"] for line in read_metrics(folder) if "val_loss" in line] == [0, 1, 2]


def test_the_best_checkpoint_outlives_newer_ones(
    config: FinetuneConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss falls until step 2 and rises afterwards; the run is resumed in between."""
    losses = {1: 0.5, 2: 0.2, 3: 0.4, 4: 0.3, 5: float("nan"), 6: 0.6}
    real = Finetuning.validate

    def validate(self: Finetuning) -> dict[str, float]:
        real(self)
        return {"val_loss": losses[len(found.append(1) or found)]}

    found: list[int] = []
    monkeypatch.setattr(Finetuning, "validate", validate)
    settings: dict[str, Any] = {"checkpoint_step_interval": 1, "checkpoints_total_limit": 2, "eval_steps_interval": 3}
    settings |= {"tread_config": None}
    finetune(replace(config, max_train_steps=4, **settings))
    again = replace(config, max_train_steps=6, resume_from_checkpoint="latest", **settings)
    folder = finetune(again)
    kept = [path.name for path in checkpoint.list_checkpoints(folder / "checkpoints")]
    assert kept == ["step-00000002", "step-00000005", "step-00000006"]
    assert (
        f"lowest validation loss: 0.2000 at step 2; its result: tread export {folder} --best" in capsys.readouterr().out
    )
    best = checkpoint.best(folder / "checkpoints")
    assert best is not None
    assert best[1]["step"] == 2
    export(folder, best=True, out=folder / "best")
    assert json.loads((folder / "best" / "result.json").read_text())["step"] == 2
    assert json.loads((folder / "result.json").read_text())["step"] == 6
    with pytest.raises(ConfigError, match="--best and --step 5 name two checkpoints"):
        export(folder, best=True, step=5)


def test_only_the_validation_of_its_own_weights_counts(config: FinetuneConfig) -> None:
    """A checkpoint of a step that was not validated has no claim, whatever was measured before."""
    folder = finetune(replace(config, eval_steps_interval=0, max_train_steps=1))
    assert checkpoint.best(folder / "checkpoints") is None
    with pytest.raises(ConfigError, match=r"no checkpoint of .* was validated, so none is the best"):
        export(folder, best=True)


def test_a_step_of_several_buckets_is_the_mean_over_its_samples(config: FinetuneConfig, tmp_path: Path) -> None:
    """Gradient accumulation across buckets: the gradient of the mean loss of all samples, each weighing the same."""
    config = replace(config, gradient_accumulation_steps=3, tread_config=None, max_grad_norm=0.0, model_type="full")
    task = make_task(config, tmp_path)
    step = next(
        step
        for step in range(20)
        if len({task.train_set.groups[int(task.order.batch(3 * step + i)[0])] for i in range(3)}) > 1
    )
    batches = [next(some) for some in [task.batches(step)] for _ in range(3)]
    assert len({tuple(batch.tensors["mean"].shape) for batch in batches}) == 2, "buckets of other shapes"

    def sample_losses() -> Iterator[torch.Tensor]:
        for batch in batches:
            for i in range(2):
                one = {name: tensor[i : i + 1] for name, tensor in batch.tensors.items()}
                span, where = task._ranges(task.family.tokens(one["mean"]))[0], one["position"]
                u = span.spread(noise.uniform(config.seed, int.from_bytes(b"time"), where))
                yield from task.sample_losses(task.model, span, one, Draws(config.seed, where, u), task.target)

    mean = torch.stack(list(sample_losses())).mean()
    expected = torch.autograd.grad(mean, list(task.model.parameters()), allow_unused=True)
    session = Session(task, FinetuneJob.of(config), task.accelerator)
    grads: list[torch.Tensor | None] = []
    session.optimizer.step = lambda *_, **__: grads.extend(p.grad.clone() for p in session.trained)  # pyright: ignore
    values = session.step(step, iter(batches))
    torch.testing.assert_close(values["loss"], mean, rtol=1e-5, atol=1e-6)
    for found, wanted in zip(grads, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_epochs_count_buckets_and_repeats(config: FinetuneConfig) -> None:
    """Two epochs of four squares and two wide pictures, three visits each: (12 / 4 + 2 batches of 6 / 4) * 2 = 10."""
    data = {"instance_data_dir": str(Path(config.cache_dir).parent / "images"), "resolution": 64, "repeats": 3}
    length = {"num_train_epochs": 2, "max_train_steps": 0, "train_batch_size": 4, "gradient_accumulation_steps": 3}
    folder = finetune(replace(config, data=data, num_eval_images=0, tread_config=None, **length))
    assert [line["step"] for line in read_metrics(folder) if "loss" in line] == [1, 2, 3, 4], "10 / 3, to the end"


class Hub(ThreadingHTTPServer):
    """The requests of an upload, answered as the hub answers them; `files` is what was committed."""

    daemon_threads = True

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses, self.files, self.asked = refuses, dict[str, bytes](), list[tuple[str, Any, str | None]]()
        super().__init__(("127.0.0.1", 0), Requests)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Requests(BaseHTTPRequestHandler):
    server: Hub  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        lines = [json.loads(line) for line in body.splitlines()]
        self.server.asked.append((self.path, lines, self.headers["Authorization"]))
        if self.server.refuses:
            return self.answer({"error": "you may not write here"}, 403)
        if self.path == "/api/repos/create":
            return self.answer({"url": f"{self.server.address}/me/{lines[0]['name']}"})
        if self.path == "/api/validate-yaml":  # the front matter of a card
            return self.answer({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            files = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in lines[0]["files"]]
            return self.answer({"files": files})
        for line in lines:
            if line["key"] == "file":
                self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return self.answer({"commitUrl": f"{self.server.address}/me/x/commit/1", "commitOid": "1", "success": True})

    def answer(self, value: Any, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def hub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    server = Hub(refuses=getattr(request, "param", False))
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield server
    server.shutdown()
    server.server_close()


def test_the_result_is_uploaded_with_the_token_of_the_environment(
    config: FinetuneConfig, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finetune(replace(config, push_to_hub=True, validation_prompt="a fox", **PREVIEWS))
    names = {"README.md", "pytorch_lora_weights.safetensors", "previews/step-00000002-0.png"}
    assert {name: (folder / name).read_bytes() for name in names} == hub.files
    assert {token for _, _, token in hub.asked} == {"Bearer hf_secret"}
    made = hub.asked[0][1][0]
    assert made["name"] == "run"
    assert made.get("private") or made.get("visibility") == "private"
    assert f"uploaded: {hub.address}/me/x/commit/1" in capsys.readouterr().out
    assert not [path for path in folder.rglob("*.*") if path.is_file() and b"hf_secret" in path.read_bytes()]


def test_the_result_of_a_sharded_run_is_uploaded_once_it_is_written(config: FinetuneConfig, hub: Hub) -> None:
    folder = finetune(replace(config, push_to_hub=True, parallel="fsdp"))
    names = {"README.md", "pytorch_lora_weights.safetensors"}
    assert {name: (folder / name).read_bytes() for name in names} == hub.files


@pytest.mark.parametrize("hub", [True], indirect=True)
def test_a_refused_upload_does_not_fail_the_run(
    config: FinetuneConfig, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finetune(replace(config, push_to_hub=True, hub_model_id="someone/else"))
    said = capsys.readouterr().out
    assert "warning: the run is complete, but its result could not be uploaded: " in said
    assert f"`hf upload someone/else {folder} --exclude 'checkpoints/*'` does it." in said
    assert (folder / "result.json").is_file()


def test_an_upload_without_a_token_or_a_name_is_refused_at_once(
    config: FinetuneConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    (problem,) = look(replace(config, push_to_hub=True)).problems
    assert problem.startswith("push_to_hub is true, but there is no token: set HF_TOKEN in the environment")
    with pytest.raises(ConfigError, match="hub_model_id is 'a/b/c', which the hub does not take"):
        finetune(replace(config, push_to_hub=True, hub_model_id="a/b/c"))
    assert not Path(config.output_dir, "checkpoints").exists()
