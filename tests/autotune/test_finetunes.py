"""`tread autotune` end to end on configs of `tread finetune`: routes for an adapter, and what cannot be tuned."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.autotune.tuned import Law, config_file, measurements, tune_cli
from tests.report.conftest import Tune
from tests.tiny.runs import forget
from tread.autotune.jobs.job import read_job
from tread.cli import main

pytestmark = pytest.mark.filterwarnings("ignore")
Capture = pytest.CaptureFixture[str]


def test_a_fine_tune(law: Law, tune: Tune, capsys: Capture) -> None:
    """A LoRA on FLUX: no ratio above an adapter's, the schedule of the config stays, and the routes run."""
    schedule = {"warmup_steps": 2, "cooldown_fraction": 0.25}
    route = {"selection_ratio": 0.3, "start_layer_idx": 1, "end_layer_idx": 1}
    config = tune(
        "flux", tread_config={"routes": [route], "schedule": schedule}, max_train_steps=4, validation_prompt=None
    )
    assert tune_cli(config_file(config), "--target-speedup", "1.01") == 0
    shown = capsys.readouterr().out
    facts = measurements(Path("autotune/c"))
    assert set(facts["losses"]) == {
        f"{window}@{ratio}" for window in ("1..1", "2..2", "3..3") for ratio in (0.25, 0.4, 0.5)
    }
    assert set(facts["result"]["cost"]["layers"]) == {"transformer_blocks", "single_transformer_blocks"}
    assert "at most 0.5 is dropped while an adapter is trained" in shown
    assert "the schedule runs the last 25% of the steps dense" in shown
    assert "dense start" not in shown
    told = json.loads(Path("autotune/c/tread_config.json").read_text())["tread_config"]
    assert told["schedule"] == schedule
    command = next(line for line in shown.splitlines() if line.startswith("train with: tread finetune c.json"))
    forget()
    main([*command.removeprefix("train with: tread ").split(), "output_dir=run"])
    record = json.loads(Path("run/run.json").read_text())
    assert record["facts"]["tread_config"]["routes"] == told["routes"]


OF_THE_RUN = [
    *["validation_guidance=2", "validation_on_startup=true", "validation_seed=1", "validation_resolution=64x64"],
    *["push_to_hub=true", "hub_model_id=me/it", "hub_private=false", "report_to=none", "tracker_run_name=one"],
    *["tracker_project_name=other", "checkpoints_keep_best=false", "timeout_minutes=5", "lora_dtype=bf16"],
    *["vae_batch_size=1", "text_encoder_batch_size=1"],
]
"""Settings of previews, uploads, trackers, checkpoints and files, as a later command may set them."""


def test_settings_that_change_no_measurement_leave_it_the_same_tuning(tune: Tune) -> None:
    config = config_file(tune("flux"))
    kept = read_job(config, []).identity()
    changed = {setting for setting in OF_THE_RUN if read_job(config, [setting]).identity() != kept}
    assert not changed
    assert read_job(config, ["lora_rank=8"]).identity() != kept


def test_a_model_to_fine_tune_that_is_too_shallow(law: Law, tune: Tune, capsys: Capture) -> None:
    assert tune_cli(config_file(tune("sd3")), "--pareto") == 2
    assert "the model has 4 layers" in capsys.readouterr().err


def test_too_few_images(law: Law, tune: Tune, capsys: Capture) -> None:
    assert tune_cli(config_file(tune("flux", train_batch_size=7)), "--pareto") == 2
    assert "6 samples of one size to train on, and a measurement needs a batch of 7" in capsys.readouterr().err


def test_a_gpu_that_is_too_small(law: Law, tune: Tune, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator's error, wherever it comes from, names what the config could change; measurements stay."""
    from tread.training.session import Session

    step, taken = Session.step, []

    def failing(session: Session, *arguments: Any, **named: Any) -> Any:
        taken.append(1)
        if len(taken) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(session, *arguments, **named)

    monkeypatch.setattr(Session, "step", failing)
    assert tune_cli(config_file(tune("flux")), "--pareto") == 2
    error = capsys.readouterr().err
    assert "not enough memory on" in error
    assert "set base_model_precision to 'int8'" in error
    assert sum(map(len, measurements(Path("autotune/c"))["seconds"].values())) == 3
