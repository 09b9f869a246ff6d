"""The settings of fine-tuning: bounds by name, the schedule of adapters, and a text for every field."""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.finetune.test_recipes import ROOT
from tread.config.fields import fields_of
from tread.config.schema import parse
from tread.errors import ConfigError
from tread.finetune.families import TUNE_FAMILIES
from tread.finetune.job import FinetuneJob
from tread.finetune.model.quantize import METHODS
from tread.finetune.settings import SCHEDULE, UNQUANTIZED, FinetuneConfig, Precision
from tread.training.optimizers.make import OPTIMIZERS
from tread.training.settings import OptimizerName

BASE = {"model_family": "flux", "pretrained_model_name_or_path": "model", "data": "photos"}
ROUTE = {"selection_ratio": 0.25, "start_layer_idx": 3, "end_layer_idx": -4}


def made(**settings: Any) -> FinetuneConfig:
    return parse(FinetuneConfig, {**BASE, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_rank": 0}, "lora_rank is 0; it must be at least 1."),
        ({"lora_alpha": 0}, "lora_alpha is 0, which scales the adapter to nothing: leave it out for lora_rank."),
        ({"output_dir": ""}, "output_dir is empty; name a folder, or write '.' for the working directory."),
        ({"cache_dir": " "}, "cache_dir is empty; name a folder, or write '.' for the working directory."),
        ({"train_batch_size": 0}, "train_batch_size is 0; it must be at least 1."),
        ({"caption_dropout_probability": 1}, "caption_dropout_probability is 1.0; allowed is 0 <= value < 1."),
        ({"flow_schedule_shift": 0}, "flow_schedule_shift is 0.0; it must be above 0, or left out."),
        ({"timeout_minutes": 0}, "timeout_minutes is 0.0; it must be above 0 and at most 10080 (a week)."),
        ({"adam_epsilon": 0}, "adam_epsilon is 0.0; it must be above 0, or left out."),
        (
            {"base_model_precision": "bf16", "mixed_precision": "no"},
            "base_model_precision is 'bf16' and mixed_precision is 'no', which would multiply bf16 weights with "
            "float32 activations: set mixed_precision to 'bf16', or leave base_model_precision out for float32 "
            "weights.",
        ),
        ({"lr_scheduler": "sine"}, "lr_scheduler is 'sine'; it must be one of 'constant', 'linear', 'cosine', "),
        ({"lr_end": 1e-6}, "lr_end is 1e-06, but lr_scheduler is 'constant', which does not fall: choose another"),
        ({"optimizer": "prodigy"}, "optimizer is 'prodigy' and learning_rate is 0.0001, but prodigy estimates"),
        ({"max_train_steps": 0}, "max_train_steps and num_train_epochs are both 0; set one of them to at least 1."),
        ({"experts": "low"}, "experts is 'low', but only wan has two transformers; leave it out."),
        ({"data": ""}, "data is empty; give a folder of images or videos with captions (docs/data.md)."),
        ({"lora_targets": []}, "lora_targets is empty, so nothing would be trained; name layers, or leave it out."),
        ({"lokr_factor": 0}, "lokr_factor is 0; it must be at least 1, or -1 for the most square one."),
        (
            {"model_type": "full", "base_model_precision": "nf4"},
            "base_model_precision is 'nf4', but model_type is 'full', and quantized weights cannot be trained: set "
            "base_model_precision to 'no_change', or model_type to 'lora'.",
        ),
        (
            {"lora_type": "lycoris"},
            "lora_type is 'lycoris' and lycoris_config is None: lora_type 'lycoris' needs a lycoris_config, and "
            "nothing else reads one. For LoKr, set lora_type to 'lokr' and lokr_factor.",
        ),
        (
            {"validation_resolution": "big"},
            "validation_resolution is 'big'; write WIDTHxHEIGHT, e.g. 1024x768, or one number for a square.",
        ),
        (
            {"model_family": "fluxx"},
            f"model_family is 'fluxx'. Did you mean 'flux'? Choose one of: {', '.join(TUNE_FAMILIES)}; other "
            "transformers train in a script of yours with tread.attach (docs/attach.md).",
        ),
        ({"tread_config": "papr"}, "tread_config is 'papr': no preset"),
        ({"tread_config": {}}, "TREAD training requires you to configure the routes"),
    ],
)
def test_out_of_bounds(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        made(**settings)
    assert str(error.value).startswith(message)


def test_a_fine_tune_gets_a_schedule_unless_it_says_otherwise() -> None:
    plan = made(tread_config={"routes": [ROUTE]}, max_train_steps=1000).plan()
    assert plan is not None
    assert plan.schedule is not None
    # at first dense, then the whole ratio, dense again at the end
    assert [plan.schedule.scale(step) for step in (0, 100, 849, 850, 999)] == [0.0, 1.0, 1.0, 0.0, 0.0]
    long = made(tread_config="lora", max_train_steps=100_000).plan()
    assert long is not None
    assert long.schedule is not None
    assert long.schedule.warmup_steps == SCHEDULE.warmup_most

    for off in ({"routes": [ROUTE], "schedule": None}, json.dumps({"preset": "lora", "schedule": None})):
        plain = made(tread_config=off).plan()
        assert plain is not None
        assert plain.schedule is None
    own = made(tread_config={"routes": [ROUTE], "schedule": {"warmup_steps": 7}}).plan()
    assert own is not None
    assert own.schedule is not None
    assert (own.schedule.warmup_steps, own.schedule.cooldown_fraction, own.schedule.total_steps) == (7, 0.0, 1000)


def test_a_full_fine_tune_gets_the_same_schedule_and_a_dense_one_no_plan() -> None:
    plan = made(tread_config="paper", model_type="full", max_train_steps=1000).plan()
    assert plan is not None
    assert plan.schedule == dataclasses.replace(SCHEDULE.of(1000), total_steps=1000)
    assert made().plan() is None


def test_epochs_become_steps_and_the_schedule_follows() -> None:
    epochs = {"num_train_epochs": 3, "max_train_steps": 0, "gradient_accumulation_steps": 4}
    config = made(**epochs, tread_config="lora").with_steps(80)
    assert (config.max_train_steps, config.num_train_epochs) == (60, 0)
    plan = config.plan()
    assert plan is not None
    assert plan.schedule is not None
    assert (plan.schedule.total_steps, plan.schedule.warmup_steps) == (60, 6)
    assert made(max_train_steps=5).with_steps(20).max_train_steps == 5


def test_data_entries_take_the_config_s_size_where_they_have_none() -> None:
    config = made(data=["photos", {"instance_data_dir": "more", "resolution": 256}], resolution=512)
    assert config.data_entries() == [
        {"resolution": 512, "instance_data_dir": "photos"},
        {"resolution": 256, "instance_data_dir": "more"},
    ]


def test_prompts_and_sizes_in_every_form() -> None:
    assert made().prompts == ()
    assert made(validation_prompt="a").prompts == ("a",)
    assert made(validation_prompt=["a", "b"]).prompts == ("a", "b")
    assert made(validation_resolution="640x480").validation_size == (640, 480)
    assert made(validation_resolution=512).validation_size == (512, 512)
    assert made().validation_size is None


def test_a_config_survives_json() -> None:
    config = made(
        data=["a", {"instance_data_dir": "b"}],
        lora_targets=["to_q"],
        tread_config={"routes": [ROUTE], "schedule": None},
    )
    assert parse(FinetuneConfig, json.loads(json.dumps(dataclasses.asdict(config)))) == config


def test_names_are_those_that_the_parts_know() -> None:
    assert set(get_args(Precision)) == {*UNQUANTIZED, *METHODS}
    assert set(get_args(OptimizerName)) == set(OPTIMIZERS)


def test_every_field_says_what_it_means() -> None:
    docs = {name: field.doc for name, field in fields_of(FinetuneConfig).items()}
    assert list(docs) == [field.name for field in dataclasses.fields(FinetuneConfig)]
    assert all(text.endswith(".") and "\n" not in text for text in docs.values())


def test_the_page_says_the_schedule() -> None:
    words, told = " ".join((ROOT / "docs" / "finetune.md").read_text().split()), SCHEDULE
    assert f"over the first {told.warmup_fraction:.0%}".replace("%", " %") in words
    assert f"({told.warmup_most} at most)" in words
    assert f"the last {told.cooldown_fraction:.0%}".replace("%", " %") in words


def test_a_shell_reads_the_command_that_goes_on() -> None:
    command = FinetuneJob.of(made()).resume_command(Path("my runs/a"))
    assert shlex.split(command) == ["tread", "finetune", "my runs/a/config.yaml", "resume_from_checkpoint=latest"]
