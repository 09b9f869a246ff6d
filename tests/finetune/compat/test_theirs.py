"""Configs of the existing trainer, known by data_backend_config: keys that mean something else there, and defaults."""

import json
from pathlib import Path
from typing import Any

import pytest

from tread.config.schema import parse
from tread.finetune.compat.translate import KeyVerdict, translate
from tread.finetune.config import read_config
from tread.finetune.settings import FinetuneConfig

ENTRY: dict[str, Any] = {"id": "a", "instance_data_dir": "photos", "caption_strategy": "textfile"}
OURS: dict[str, Any] = {"model_family": "flux", "pretrained_model_name_or_path": "model", "data": "photos"}
THEIRS: dict[str, Any] = {
    "model_family": "flux",
    "pretrained_model_name_or_path": "model",
    "data_backend_config": [ENTRY],
    "model_type": "lora",
    "max_train_steps": 50,
}
ROUTES = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -2}]}


def verdicts(config: dict[str, Any]) -> dict[str, KeyVerdict]:
    return {one.key: one for one in translate(config).verdicts}


def settings(config: dict[str, Any]) -> FinetuneConfig:
    translated = translate(config)
    assert translated.unsupported == []
    return parse(FinetuneConfig, translated.settings)


@pytest.mark.parametrize(("given", "visits"), [(0, 1), (1, 2), (4, 5)])
def test_repeats_count_the_visits_after_the_first(given: int, visits: int) -> None:
    config = {**THEIRS, "data_backend_config": [{**ENTRY, "repeats": given}]}
    assert settings(config).data_entries()[0]["repeats"] == visits
    found = verdicts(config)["data_backend_config[0].repeats"]
    assert found.text == f"repeats: {visits} (all visits are counted, there those after the first)"


def test_repeats_of_our_own_data_count_all_visits() -> None:
    own = {**ENTRY, "repeats": 4}
    assert settings({**OURS, "data": [own]}).data_entries()[0]["repeats"] == 4
    both = settings({**THEIRS, "data": [own], "data_backend_config": [{**ENTRY, "id": "b", "repeats": 4}]})
    assert [entry["repeats"] for entry in both.data_entries()] == [4, 5]
    assert settings({**THEIRS, "data": "photos"}).data_entries()[0] == {"instance_data_dir": "photos"}
    assert "repeats" in verdicts({**OURS, "data": [{**ENTRY, "repeats": 0}]})["data[0]"].text


@pytest.mark.parametrize(
    ("given", "became", "kind"),
    [
        (
            {"prepend_instance_prompt": True, "instance_prompt": "minecraft"},
            {"caption_prefix": "minecraft"},
            "translated",
        ),
        ({"only_instance_prompt": True, "instance_prompt": "x"}, {"caption_strategy": "instanceprompt"}, "translated"),
        ({"is_regularisation_data": True, "loss_weight": 0.5}, {"loss_weight": 0.5}, "differs"),
    ],
)
def test_captions_and_weights_of_an_entry(given: dict[str, Any], became: dict[str, Any], kind: str) -> None:
    config = {**THEIRS, "data_backend_config": [{**ENTRY, **given}]}
    (entry,) = settings(config).data_entries()
    assert {name: entry[name] for name in became} == became
    assert verdicts(config)[f"data_backend_config[0].{next(iter(given))}"].verdict == kind


def test_a_translated_config_is_read_again_as_ours() -> None:
    first = translate({**THEIRS, "data_backend_config": [{**ENTRY, "repeats": 1}], "max_grad_norm": 0.5})
    again = translate(first.settings)
    assert again.settings == first.settings
    assert {one.verdict for one in again.verdicts} == {"runs"}


@pytest.mark.parametrize(
    ("config", "norm", "kind"),
    [
        ({**THEIRS, "max_grad_norm": 0.1}, 1.0, "differs"),
        (THEIRS, 1.0, "differs"),
        ({**THEIRS, "max_grad_norm": 0.1, "grad_clip_method": "norm"}, 0.1, "runs"),
        ({**THEIRS, "max_grad_norm": 0.0}, 0.0, "runs"),
        ({**OURS, "max_grad_norm": 0.1}, 0.1, "runs"),
        ({**OURS, "max_grad_norm": 0.1, "grad_clip_method": "value"}, 1.0, "differs"),
    ],
)
def test_clipping_is_by_value_there_unless_it_says_norm(config: dict[str, Any], norm: float, kind: str) -> None:
    assert settings(config).max_grad_norm == norm
    assert verdicts(config)["max_grad_norm"].verdict == kind


def test_a_positive_shift_wins_and_it_is_3_by_default() -> None:
    auto = {**THEIRS, "flow_schedule_auto_shift": True}
    assert settings({**auto, "flow_schedule_shift": 1.73}).flow_schedule_shift == 1.73
    assert settings({**auto, "flow_schedule_shift": 0}).flow_schedule_shift is None
    assert settings(auto).flow_schedule_shift == settings(THEIRS).flow_schedule_shift == 3.0
    assert settings(OURS).flow_schedule_shift is None
    assert settings({**THEIRS, "model_family": "pixart_sigma", "flow_schedule_shift": 3}).flow_schedule_shift is None


@pytest.mark.parametrize(
    ("given", "key", "text"),
    [
        ({"lr_scheduler": "cosine"}, "lr_scheduler", "there it restarts after as many steps as lr_warmup_steps"),
        ({"loss_type": "huber"}, "loss_type", "threshold 1; there huber_c 0.1 with huber_schedule snr"),
        ({"loss_type": "huber", "huber_c": 0.5}, "huber_c", "the threshold of huber is 1 at every time"),
        ({"use_ema": True, "ema_update_interval": 5}, "ema_update_interval", "there every 5 steps"),
        ({"tread_config": ROUTES}, "tread_config", "tread adds a schedule "),
        ({"tread_config": ROUTES}, "tread_config", " and routed_loss: kept "),
        ({"tread_config": {**ROUTES, "schedule": None}}, "tread_config", "tread adds routed_loss: kept "),
        ({}, "lora_targets", "left out; the family's own layers here are not those that it has there"),
        ({"model_family": "sd3"}, "lora_targets", "left out"),
    ],
)
def test_what_trains_something_else_is_named(given: dict[str, Any], key: str, text: str) -> None:
    found = verdicts({**THEIRS, **given})[key]
    assert found.verdict == "differs"
    assert text in found.text


def test_what_has_an_effect_is_not_called_ignored() -> None:
    found = verdicts({**THEIRS, "offset_noise": True, "noise_offset": 0.2})["noise_offset"]
    assert (found.verdict, found.text) == ("translated", "with offset_noise")


def test_what_means_the_same_is_not_called_different() -> None:
    polynomial = {**THEIRS, "learning_rate": 1e-4, "lr_scheduler": "polynomial"}
    assert verdicts(polynomial)["lr_scheduler"].text == "lr_scheduler: polynomial, lr_power: 0.8, lr_end: 4e-07"
    config = settings({**polynomial, "lr_power": 2, "lr_end": 0})
    assert (config.lr_scheduler, config.lr_power, config.lr_end) == ("polynomial", 2.0, 0.0)
    assert verdicts({**THEIRS, "lr_end": 1e-6})["lr_end"].verdict == "ignored", "the rate is constant there"
    assert verdicts({**OURS, "lr_scheduler": "cosine"})["lr_scheduler"].verdict == "runs"
    for named in ({"lora_targets": ["to_q"]}, {"peft_lora_target_modules": ["to_q"]}, {"model_type": "full"}):
        found = verdicts({**THEIRS, **named}).get("lora_targets")
        assert found is None or found.verdict == "runs"
    routes = {"tread_config": {**ROUTES, "schedule": None}, "routed_loss": "all"}
    assert verdicts({**THEIRS, **routes})["tread_config"].verdict == "runs"
    assert verdicts({**OURS, "tread_config": ROUTES})["tread_config"].verdict == "runs"


@pytest.mark.parametrize("key", ["masked_loss_probability", "flux_guidance_value"])
def test_0_is_a_value_of_its_own(key: str) -> None:
    assert verdicts({**OURS, key: 0})[key].verdict == "unsupported"
    assert verdicts({**OURS, key: 1.0})[key].verdict in ("runs", "ignored")


@pytest.mark.parametrize(
    ("factors", "factor", "text"),
    [
        ({"Attention": 16, "FeedForward": 8}, 4, "lokr_factor 4; there Attention has 16, FeedForward has 8"),
        ({"Attention": 16, "FeedForward": 16}, 16, "lokr_factor 16; there Attention has 16, FeedForward has 16"),
    ],
)
def test_factors_per_module_are_named(factors: dict[str, int], factor: int, text: str) -> None:
    preset = {
        "target_module": list(factors),
        "module_algo_map": {name: {"factor": own} for name, own in factors.items()},
    }
    lycoris = {"algo": "lokr", "linear_dim": 8, "factor": 4, "apply_preset": preset}
    config = {**THEIRS, "lora_type": "lycoris", "lycoris_config": lycoris}
    assert settings(config).lokr_factor == factor
    assert verdicts(config)["lycoris_config.apply_preset"].text.endswith(text)


def test_defaults_that_differ_are_filled_in() -> None:
    bare = {"model_family": "flux", "pretrained_model_name_or_path": "model", "data_backend_config": [ENTRY]}
    config = settings({**bare, "use_ema": True})
    assert (config.model_type, config.optimizer, config.base_model_precision) == ("full", "adamw-bf16", "bf16")
    assert (config.learning_rate, config.train_batch_size, config.flow_schedule_shift) == (4e-7, 4, 3.0)
    assert (config.ema_decay, config.num_train_epochs, config.vae_dtype) == (0.995, 1, "bf16")
    assert settings(THEIRS).lora_dropout == 0.1
    assert verdicts(THEIRS)["learning_rate"].text == "learning_rate: 4e-07; left out, and this is the default there"
    # a null is left out too, and nothing is filled into a config of ours
    assert settings({**THEIRS, "learning_rate": None}).learning_rate == 4e-7
    assert settings(OURS) == parse(FinetuneConfig, OURS)


def test_entries_without_a_caption_strategy_take_file_names() -> None:
    bare = {"id": "a", "instance_data_dir": "photos"}
    hub = {"id": "b", "type": "huggingface", "dataset_name": "me/photos"}
    found = settings({**THEIRS, "data_backend_config": [bare, hub]}).data_entries()
    assert [entry.get("caption_strategy") for entry in found] == ["filename", None]
    found = settings({**THEIRS, "data_backend_config": [bare], "caption_strategy": "textfile"}).data_entries()
    assert found[0]["caption_strategy"] == "textfile"


@pytest.mark.parametrize(
    ("family", "model"),
    [
        ("flux", "black-forest-labs/FLUX.1-Krea-dev"),
        ("flux2", "black-forest-labs/FLUX.2-klein-base-9B"),
        ("sd3", "stabilityai/stable-diffusion-3.5-medium"),
        ("qwen_image", "Qwen/Qwen-Image-2512"),
        ("pixart_sigma", "terminusresearch/pixart-900m-1024-ft-v0.6"),
    ],
)
def test_the_family_names_the_model(family: str, model: str) -> None:
    config = {**THEIRS, "model_family": family, "pretrained_model_name_or_path": None}
    assert settings(config).pretrained_model_name_or_path == model


@pytest.mark.parametrize("dataset_type", ["video", "image"])
def test_the_video_column_holds_the_files(dataset_type: str) -> None:
    entry = {"id": "v", "type": "huggingface", "dataset_name": "me/clips", "caption_strategy": "huggingface"}
    entry |= {"dataset_type": dataset_type}
    nested = {"huggingface": {"video_column": "clip", "caption_column": "words"}}
    config = {**THEIRS, "model_family": "wan", "data_backend_config": [entry | nested]}
    found = settings(config).data_entries()[0]
    assert (found["image_column"], found["caption_column"]) == ("clip", "words")
    flat = settings({**config, "data_backend_config": [entry | {"video_column": "clip"}]}).data_entries()[0]
    assert flat["image_column"] == "clip"


def test_a_family_that_is_not_tuned_is_one_verdict_among_others() -> None:
    config = {**THEIRS, "model_family": "ideogram", "pretrained_model_name_or_path": None, "model_flavour": "fp8"}
    assert [one.key for one in translate(config).unsupported] == ["model_family"]
    wrong = {"learning_rate": "fast", "tread_config": {"routes": [{**ROUTES["routes"][0], "selection_ratio": 1.5}]}}
    assert {one.key for one in translate(config | wrong).unsupported} >= {"model_family", "learning_rate"}
    del wrong["learning_rate"]
    assert [one.key for one in translate(config | wrong).unsupported] == ["model_family", "tread_config"]
    full = {"model_type": "full", "base_model_precision": "nf4"}
    assert [one.key for one in translate(config | full).unsupported] == ["model_family", "base_model_precision"]


def test_a_run_says_what_differs(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**THEIRS, "lr_scheduler": "cosine"}))
    with pytest.warns(UserWarning, match=r"trains something else than where it comes from by lr_scheduler, "):
        assert read_config(file).lr_scheduler == "cosine"
