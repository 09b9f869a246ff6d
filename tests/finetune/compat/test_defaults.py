"""Options of the existing trainer that we do not have: silent at their defaults, explained otherwise."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from tread.finetune.compat.defaults import DEFAULTS
from tread.finetune.compat.translate import KeyVerdict, translate
from tread.finetune.config import read_config

BASE: dict[str, Any] = {"model_family": "flux", "pretrained_model_name_or_path": "model", "data": "photos"}


def verdict(key: str, value: Any, **others: Any) -> KeyVerdict:
    (found,) = (one for one in translate({**BASE, **others, key: value}).verdicts if one.key == key)
    return found


def test_every_option_at_its_own_default_is_accepted_without_a_word() -> None:
    told = {key: verdict(key, DEFAULTS[key]) for key in DEFAULTS.keys() - BASE.keys()}
    assert len(told) > 400
    assert [one for one in told.values() if one.verdict not in ("runs", "translated")] == []


def test_the_default_file_of_lycoris_is_not_read_for_another_adapter(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**BASE, "lycoris_config": DEFAULTS["lycoris_config"], "crepa_lambda": 0.5}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_config(file).lora_type == "standard"


def test_a_default_may_be_written_as_text() -> None:
    for key, text in {"crepa_lambda": "0.5", "crepa_enabled": "false", "lr_end": "4e-7"}.items():
        assert verdict(key, text).verdict == "runs"


@pytest.mark.parametrize(
    ("key", "value", "kind", "text"),
    [
        ("validation_disable", True, "translated", "validation_steps: 0"),
        ("peft_lora_target_modules", ["to_q", "to_k"], "translated", 'lora_targets: ["to_q", "to_k"]'),
        ("adam_epsilon", "1e-6", "runs", ""),
        ("crepa_enabled", True, "unsupported", "leave it out; no loss is added to the denoising loss"),
        ("crepa_lambda", 0.7, "ignored", "an option of crepa_enabled"),
        ("train_text_encoder", True, "unsupported", "leave it out; text encoders stay as they are"),
        ("save_text_encoder", True, "unsupported", "has no counterpart here; leave it out, or write false"),
        ("maximum_image_size", 1024, "unsupported", "write it in the data entries"),
        ("parquet_caption_column", "text", "unsupported", "write caption_column in the data entry"),
        ("lr_scale", True, "unsupported", "leave it out, and write the learning_rate that it comes to"),
        ("timestep_bias_portion", 0.5, "ignored", "an option of timestep_bias_strategy"),
        ("huber_c", 0.5, "ignored", "an option of loss_type huber"),
        ("print_filenames", True, "ignored", "nothing that is learned depends on it"),
        ("validation_preview", True, "ignored", "it concerns previews alone"),
    ],
)
def test_other_values_say_what_to_do(key: str, value: Any, kind: str, text: str) -> None:
    found = verdict(key, value)
    assert (found.verdict, found.text) == (kind, text)


@pytest.mark.parametrize("key", ["validation_steps", "validation_step_interval"])
def test_validation_disable_wins_over_an_interval(key: str) -> None:
    config = {**BASE, "validation_disable": True, key: 50}
    for given in (config, dict(reversed(config.items()))):
        assert translate(given).settings["validation_steps"] == 0
