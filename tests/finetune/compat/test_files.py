"""Configs of the existing trainer in its other formats, TOML and environment files, and formats that are not read."""

from pathlib import Path

import pytest

from tread.config.jobs import SHARED, TRAIN_SECTIONS
from tread.errors import ConfigError
from tread.finetune.compat.defaults import DEFAULTS
from tread.finetune.compat.environment import from_environment
from tread.finetune.compat.formats import MARKS
from tread.finetune.compat.keys import RULES
from tread.finetune.config import read_config
from tread.finetune.settings import FinetuneConfig


def test_a_toml_config_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        'model_family = "flux"\npretrained_model_name_or_path = "model"\ndata = "photos"\n'
        'learning_rate = 5e-5\noptimizer = "optimi-lion"\n'
    )
    config = read_config(file)
    assert (config.learning_rate, config.optimizer) == (5e-5, "lion")


def test_an_environment_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "entries.json").write_text('[{"id": "a", "instance_data_dir": "b", "caption_strategy": "textfile"}]')
    file = tmp_path / "config.env"
    file.write_text(
        f"""export MODEL_TYPE='lora'
export FLUX=true
export KOLORS=false
export MODEL_NAME="model"
export DATALOADER_CONFIG="{tmp_path / "entries.json"}"
export MAX_NUM_STEPS=50
export NUM_EPOCHS=0
export LR_SCHEDULE="constant"
export LEARNING_RATE=1e-5 #@param
export TRAINING_SEED=7
export TRAINER_EXTRA_ARGS="--lora_rank=8"
export TRAINER_EXTRA_ARGS="${{TRAINER_EXTRA_ARGS}} --lora_alpha 4 --use_ema"
"""
    )
    config = read_config(file)
    assert (config.model_family, config.pretrained_model_name_or_path, config.max_train_steps) == ("flux", "model", 50)
    assert (config.learning_rate, config.seed, config.lora_rank, config.lora_alpha) == (1e-5, 7, 8, 4.0)
    assert config.use_ema
    assert config.data_entries()[0]["instance_data_dir"] == "b"


@pytest.mark.parametrize("line", ["stray --a=1", "--a='open", "--a=1 2"])
def test_a_wrong_line_of_options_is_named(line: str) -> None:
    with pytest.raises(ConfigError, match=r"^TRAINER_EXTRA_ARGS"):
        from_environment({"TRAINER_EXTRA_ARGS": line})


FOREIGN = [
    (
        "a.yaml",
        "job: extension\nconfig: {name: my_lora, process: [{type: sd_trainer, train: {lr: 1e-4}}]}",
        "ai-toolkit",
    ),
    (
        "b.toml",
        '[model]\npretrained_model_name_or_path = "m"\n[network]\nnetwork_module = "a"\nnetwork_dim = 8',
        "sd-scripts",
    ),
    ("c.toml", "[general]\nenable_bucket = true\n[[datasets]]\nresolution = 512", "sd-scripts"),
    ("d.json", '{"training_method": "LORA", "base_model_name": "m", "ema": "OFF"}', "OneTrainer"),
    ("e.toml", "micro_batch_size_per_gpu = 1\n[model]\ntype = 'flux'\n[adapter]\nrank = 32", "diffusion-pipe"),
    ("f.toml", "resolutions = [512]\n[[directory]]\npath = 'images'", "diffusion-pipe"),
]


@pytest.mark.parametrize(("name", "text", "trainer"), FOREIGN)
def test_configs_in_other_formats_are_refused_by_name(name: str, text: str, trainer: str, tmp_path: Path) -> None:
    """Some have the sections of `tread train` (model, ema), others nothing but unknown keys."""
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"is a config of {trainer}.* not read: write one with `tread init"):
        read_config(tmp_path / name)


def test_keys_that_give_a_format_away_are_no_keys_of_ours() -> None:
    ours = {*FinetuneConfig.__dataclass_fields__, *RULES, *DEFAULTS, *TRAIN_SECTIONS, *SHARED}
    assert not ours & {mark for marks in MARKS.values() for mark in marks}
