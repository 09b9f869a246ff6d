"""Configs of the existing trainer: every published key has a verdict, and what is translated means the same."""

import json
from pathlib import Path
from typing import Any

import pytest

from tread.config.schema import parse
from tread.errors import ConfigError
from tread.finetune.compat.keys import DATA_RULES, PREFIXES, RULES
from tread.finetune.compat.models import MODELS
from tread.finetune.compat.translate import KeyVerdict, translate
from tread.finetune.config import read_config
from tread.finetune.families import TUNE_FAMILIES, family_class
from tread.finetune.settings import FinetuneConfig

BASE: dict[str, Any] = {"model_family": "flux", "pretrained_model_name_or_path": "model", "data": "photos"}
KEYS = json.loads((Path(__file__).parent / "existing_keys.json").read_text())
"""The keys of published example configs and of their data lists, with usual values."""
LYCORIS = {
    "algo": "lokr",
    "multiplier": 1.0,
    "full_matrix": True,
    "linear_dim": 10000,
    "linear_alpha": 1,
    "factor": 16,
    "bypass_mode": True,
    "apply_preset": {"target_module": ["Attention", "FeedForward"]},
}
UNSUPPORTED = {
    ("model_family", "minimaxh3"),
    ("model_family", "ideogram"),
    ("model_family", "mageflow"),
    ("model_family", "minimaxmusic"),
    ("base_model_precision", "int2-quanto"),
    ("context_parallel_size", 2),
    ("controlnet", True),
    ("distillation_method", "h3_drift"),
    ("distillation_method", "anyflow"),
}
"""Of the published values, those that cannot be honoured."""


def verdict(config: dict[str, Any], key: str) -> KeyVerdict:
    (found,) = (one for one in translate(config).verdicts if one.key == key)
    return found


def settings(**config: Any) -> FinetuneConfig:
    translated = translate({**BASE, **config})
    assert translated.unsupported == []
    return parse(FinetuneConfig, translated.settings)


def test_every_published_key_and_value_has_a_verdict() -> None:
    refused: set[tuple[str, Any]] = set()
    for key, values in KEYS["config"].items():
        if key in LYCORIS:
            continue
        for value in values or [None]:
            together = {"lycoris_config": LYCORIS} if value == "lycoris" else {}
            found = verdict({**BASE, **together, key: value}, key)
            assert "unknown" not in found.text, key
            assert found.verdict == "runs" or found.text, key
            if found.verdict == "unsupported":
                refused.add((key, value))
    assert refused == UNSUPPORTED


def test_weights_in_host_memory_are_offloaded_layers() -> None:
    assert settings(musubi_blocks_to_swap=18).offload == 18
    assert settings(ramtorch=True).offload == settings(enable_group_offload=True).offload == "auto"
    assert settings(musubi_blocks_to_swap=0).offload == "none"
    assert settings(musubi_blocks_to_swap=18, offload="auto").offload == "auto"


def test_what_every_data_entry_sets_itself_is_ignored() -> None:
    own, none = {"instance_data_dir": "a", "resolution": 512}, {"instance_data_dir": "b"}
    found = verdict({**BASE, "data": [own], "resolution": 64}, "resolution")
    assert (found.verdict, found.text) == ("ignored", "every data entry sets its own")
    for data in ([own, none], [own, "b"], "b"):
        assert verdict({**BASE, "data": data, "resolution": 64}, "resolution").verdict == "runs"


def test_a_wrong_route_is_a_verdict_on_the_routes() -> None:
    route = {"selection_ratio": 1.5, "start_layer_idx": 2, "end_layer_idx": -2}
    found = verdict({**BASE, "tread_config": {"routes": [route]}}, "tread_config")
    assert found.verdict == "unsupported"
    assert found.text.startswith("routes[0]: selection_ratio of route 2..-2 at 1.5 is 1.5")


def test_every_published_key_of_lycoris_and_of_data_has_one() -> None:
    inside = [key for key in KEYS["config"] if key in LYCORIS]
    assert set(inside) == set(LYCORIS)
    for key in inside:
        found = verdict({**BASE, "lora_type": "lycoris", "lycoris_config": LYCORIS}, f"lycoris_config.{key}")
        assert found.verdict in ("translated", "differs", "ignored")
        assert verdict({**BASE, key: LYCORIS[key]}, key).text == "write it inside lycoris_config"

    place = {"instance_data_dir": "photos", "instance_prompt": "a toy", "dataset_name": "me/photos"}
    given = {"huggingface": [{"caption_column": "text"}], "conditioning": [None, {"type": "canny"}], "video": [{}]}
    for key, values in KEYS["data"].items():
        for value in given.get(key, values) or ["x"]:
            kind = {"type": "huggingface"} if value == "huggingface" else {}
            found = translate({**BASE, "data": [{**place, **kind, key: value}]}).verdicts
            name = "data[0]" if value == "text_embeds" else f"data[0].{key}"
            (told,) = (one for one in found if one.key == name)
            assert "unknown" not in told.text
            assert (told.verdict == "unsupported") == (value == {"type": "canny"}), key


def test_null_is_as_good_as_a_key_left_out() -> None:
    """Except for three keys of which null is a value."""
    values: dict[str, dict[str, Any]] = {
        "dynamo_backend": {"compile": False},
        "mixed_precision": {"mixed_precision": "no"},
        "report_to": {"report_to": "none"},
    }
    for key in RULES.keys() - BASE.keys() - LYCORIS.keys():
        found = translate({**BASE, key: None})
        assert found.unsupported == [], key
        assert {name: v for name, v in found.settings.items() if v is not None} == BASE | values.get(key, {}), key
    for key in DATA_RULES.keys() - {"huggingface"}:
        found = translate({**BASE, "data": [{"instance_data_dir": "a", key: None}]})
        assert found.unsupported == [], key
        assert found.settings["data"] == ({"instance_data_dir": "a"},), key


def test_no_setting_begins_like_keys_that_are_judged_together() -> None:
    assert [name for name in FinetuneConfig.__dataclass_fields__ if name.startswith(tuple(PREFIXES))] == []


def test_a_published_config_runs_with_its_data_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape of a usual one: flavour for a path, names with dashes, a text_embeds entry, a lycoris file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lycoris.json").write_text(json.dumps(LYCORIS))
    entries = [
        {
            "id": "photos",
            "type": "local",
            "instance_data_dir": "photos",
            "caption_strategy": "textfile",
            "metadata_backend": "discovery",
            "crop": True,
            "crop_aspect": "square",
            "crop_style": "center",
            "resolution": 512,
            "resolution_type": "pixel_area",
            "minimum_image_size": 256,
            "maximum_image_size": 1024,
            "target_downsample_size": 1024,
            "cache_dir_vae": "cache/vae",
            "repeats": 2,
        },
        {"id": "text", "type": "local", "dataset_type": "text_embeds", "default": True, "cache_dir": "cache/text"},
    ]
    (tmp_path / "entries.json").write_text(json.dumps(entries))
    config = {
        "model_family": "flux",
        "model_flavour": "kontext",
        "model_type": "lora",
        "lora_type": "lycoris",
        "lycoris_config": "lycoris.json",
        "lora_rank": 16,
        "data_backend_config": "entries.json",
        "optimizer": "adamw_bf16",
        "learning_rate": "1e-4",
        "lr_scheduler": "constant_with_warmup",
        "lr_warmup_steps": 50,
        "max_train_steps": 100,
        "num_train_epochs": 0,
        "checkpoint_step_interval": 50,
        "validation_step_interval": 25,
        "validation_prompt": "a sign",
        "grad_clip_method": "value",
        "max_grad_norm": 0.01,
        "base_model_precision": "int8-sdnq",
        "sdnq_group_size": -1,
        "dynamo_backend": "inductor",
        "flow_schedule_shift": 0.0,
        "mixed_precision": "bf16",
        "output_dir": "runs/mine",
        "hub_model_id": "mine",
        "push_to_hub": False,
        "report_to": "none",
        "ramtorch": False,
        "tread_config": {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": 5}]},
    }
    (tmp_path / "config.json").write_text(json.dumps({f"--{key}": value for key, value in config.items()}))
    with pytest.warns(UserWarning, match="ignored"):
        read = read_config("config.json")
    assert read.pretrained_model_name_or_path == "black-forest-labs/FLUX.1-Kontext-dev"
    assert (read.lora_type, read.lora_rank, read.lora_alpha, read.lokr_factor) == ("lokr", 10000, 10000.0, 16)
    assert (read.optimizer, read.learning_rate, read.lr_scheduler) == ("adamw", 1e-4, "constant")
    assert (read.validation_steps, read.max_grad_norm, read.flow_schedule_shift) == (25, 1.0, 1.0)
    assert (read.base_model_precision, read.compile, read.report_to) == ("int8", True, "none")
    (entry,) = read.data_entries()
    dropped = {"metadata_backend", "cache_dir_vae"}
    kept = {key: value for key, value in entries[0].items() if key not in dropped}
    assert entry == {**kept, "repeats": 3}


@pytest.mark.parametrize(
    ("given", "became"),
    [
        ({"optimizer": "optimi-lion"}, {"optimizer": "lion"}),
        ({"optimizer": "torch-adamw"}, {"optimizer": "adamw"}),
        ({"optimizer": "bnb-adamw8bit"}, {"optimizer": "adamw-8bit"}),
        (
            {"optimizer": "adamw_bf16", "model_type": "full"},
            {"optimizer": "adamw-bf16", "base_model_precision": "bf16"},
        ),
        (
            {"base_model_precision": "no_change", "optimizer": "adamw_bf16", "model_type": "full"},
            {"base_model_precision": "bf16"},
        ),
        ({"optimizer": "adamw_schedulefree"}, {"optimizer": "adamw-schedule-free"}),
        ({"use_dora": True, "init_lora": "a.safetensors"}, {"use_dora": True, "init_lora": "a.safetensors"}),
        ({"lora_format": "comfyui"}, {"lora_type": "standard"}),
        ({"lr_scheduler": "polynomial"}, {"lr_scheduler": "polynomial", "lr_power": 1.0, "lr_end": 0.0}),
        (
            {"lr_scheduler": "cosine_with_restarts", "lr_num_cycles": 3},
            {"lr_scheduler": "cosine_with_restarts", "lr_num_cycles": 3},
        ),
        ({"flow_schedule_auto_shift": True, "flow_schedule_shift": 3}, {"flow_schedule_shift": 3.0}),
        ({"flow_schedule_auto_shift": True, "flow_schedule_shift": 0}, {"flow_schedule_shift": None}),
        ({"flow_schedule_auto_shift": True}, {"flow_schedule_shift": None}),
        ({"validation_steps": 7, "validation_step_interval": 9}, {"validation_steps": 7}),
        ({"flow_use_uniform_schedule": True, "flow_sigmoid_scale": 2}, {"time_density": "uniform", "logit_std": 1.0}),
        ({"flow_use_beta_schedule": True}, {"time_density": "beta", "beta_alpha": 2.0, "beta_beta": 2.0}),
        ({"flow_use_beta_schedule": True, "flow_beta_schedule_alpha": 3}, {"beta_alpha": 3.0, "beta_beta": 2.0}),
        ({"flow_sigmoid_scale": 0.5}, {"time_density": "logit-normal", "logit_std": 0.5}),
        ({"flow_sigmoid_scale": 1}, {"time_density": None, "logit_std": 1.0}),
        ({"snr_gamma": 5, "model_family": "pixart_sigma"}, {"snr_gamma": 5.0}),
        ({"offset_noise": True}, {"noise_offset": 0.1, "noise_offset_probability": 0.25}),
        ({"offset_noise": True, "noise_offset": 0.05}, {"noise_offset": 0.05, "noise_offset_probability": 0.25}),
        ({"offset_noise": False, "noise_offset": 0.05}, {"noise_offset": 0.0}),
        ({"noise_offset": 0.05}, {"noise_offset": 0.05, "noise_offset_probability": 1.0}),
        ({"push_to_hub": True, "hub_model_id": "me/mine"}, {"push_to_hub": True, "hub_model_id": "me/mine"}),
        ({"hub_model_id": "me/mine", "push_to_hub_background": True}, {"push_to_hub": False, "hub_model_id": None}),
        ({"validation_on_startup": True}, {"validation_on_startup": True}),
        ({"mixed_precision": False}, {"mixed_precision": "no"}),
        ({"report_to": "all"}, {"report_to": "auto"}),
        ({"dynamo_backend": "no"}, {"compile": False}),
        ({"flow_schedule_shift": "0", "lora_rank": "8"}, {"flow_schedule_shift": 1.0, "lora_rank": 8}),
        ({"num_train_epochs": "0", "max_train_steps": "50"}, {"num_train_epochs": 0, "max_train_steps": 50}),
        ({"num_train_epochs": 2, "max_train_steps": 50}, {"num_train_epochs": 2, "max_train_steps": 1000}),
        ({"lora_rank": None, "validation_negative_prompt": None}, {"lora_rank": 16, "validation_negative_prompt": ""}),
        (
            {
                "lora_type": "lycoris",
                "lycoris_config": {"algo": "lokr", "linear_dim": 8, "linear_alpha": 2, "factor": 4},
            },
            {"lora_type": "lokr", "lora_rank": 8, "lora_alpha": 2.0, "lokr_factor": 4, "lycoris_config": None},
        ),
        (
            {"lora_type": "lycoris", "lycoris_config": {"algo": "loha", "linear_dim": 8}},
            {"lora_type": "lycoris", "lycoris_config": {"algo": "loha", "linear_dim": 8}},
        ),
    ],
)
def test_values_in_other_words(given: dict[str, Any], became: dict[str, Any]) -> None:
    config = settings(**given)
    assert {name: getattr(config, name) for name in became} == became
    # and whatever the order of the keys
    assert settings(**dict(reversed(given.items()))) == config


@pytest.mark.parametrize(
    ("given", "key", "text"),
    [
        ({"lora_format": "comfyui", "model_family": "prx"}, "lora_format", "written in the diffusers format"),
        ({"optimizer": "prodigy"}, "optimizer", "prodigy estimates the rate by itself"),
        ({"optimizer": "dadaptation"}, "optimizer", "write optimizer: adamw"),
        ({"optimizer": "adamw_schedulefree+aggressive"}, "optimizer", "adamw-schedule-free"),
        ({"optimizer": "sgd"}, "optimizer", "optimizer is 'sgd'; it must be one of 'adamw', "),
        ({"lr_scheduler": "sine"}, "lr_scheduler", "write lr_scheduler: cosine"),
        ({"mixed_precision": "fp16"}, "mixed_precision", "write bf16"),
        ({"loss_type": "smooth_l1"}, "loss_type", "write huber"),
        ({"snr_gamma": 5}, "snr_gamma", "min-SNR is for models of noise or v"),
        ({"push_checkpoints_to_hub": True}, "push_checkpoints_to_hub", "upload checkpoints with `hf upload`"),
        ({"logit_std": 2}, "logit_std", "but time_density is null: set it to 'logit-normal'"),
        ({"model_family": "mageflow"}, "model_family", "with tread.attach (docs/attach.md"),
        ({"lora_rank": 1.5}, "lora_rank", "lora_rank is 1.5; it must be a whole number."),
        ({"data": [{"instance_data_dir": "a", "repeats": "x"}]}, "data[0].repeats", "it must be a whole number"),
        ({"data": [{"instance_data_dir": "a", "captions": "x"}]}, "data[0].captions", "Did you mean 'caption_"),
        ({"data": [{"type": "local"}]}, "data[0]", "has no instance_data_dir"),
        ({"data": [{"dataset_type": "text_embeds"}]}, "data", "no entry has images or videos"),
        ({"data": 3}, "data", "it must be a path or a mapping"),
        ({"model_type": "full", "base_model_precision": "nf4"}, "base_model_precision", "cannot be trained"),
    ],
)
def test_what_is_not_supported_says_what_to_write(given: dict[str, Any], key: str, text: str) -> None:
    found = verdict({**BASE, **given}, key)
    assert found.verdict == "unsupported"
    assert text in found.text


def test_what_is_missing_is_named_with_an_example() -> None:
    told = {one.key: one.text for one in translate({"model_family": "sd3"}).verdicts if one.verdict == "unsupported"}
    assert list(told) == ["pretrained_model_name_or_path", "data"]
    assert told["pretrained_model_name_or_path"].endswith("e.g. stabilityai/stable-diffusion-3.5-medium")
    assert [one.key for one in translate({}).verdicts] == ["model_family", "pretrained_model_name_or_path", "data"]


def test_flavours_name_models_and_experts() -> None:
    wan = {"model_family": "wan", "pretrained_model_name_or_path": None, "model_flavour": "t2v-14b-2.2-low"}
    config = settings(**wan)
    assert config.pretrained_model_name_or_path == "Wan-AI/Wan2.2-T2V-A14B-Diffusers"
    assert config.experts == "low"
    assert settings(model_flavour="dev").pretrained_model_name_or_path == "model"
    for family, models in MODELS.items():
        for name, model in models.items():
            named = settings(model_family=family, pretrained_model_name_or_path=None, model_flavour=name)
            assert named.pretrained_model_name_or_path == model
    unknown = verdict({"model_family": "wan", "data": "a", "model_flavour": "t3v"}, "model_flavour")
    assert unknown.text.startswith("write pretrained_model_name_or_path instead (t2v-480p-1.3b-2.1, ")


@pytest.mark.parametrize(
    "snippet",
    [
        {"tread_config": {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": 5}]}},
        {
            "tread_config": {
                "routes": [
                    {"selection_ratio": 0.3, "start_layer_idx": 1, "end_layer_idx": 3},
                    {"selection_ratio": 0.5, "start_layer_idx": 4, "end_layer_idx": 8},
                    {"selection_ratio": 0.7, "start_layer_idx": -4, "end_layer_idx": -1},
                ]
            }
        },
        {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -2}]},
        {"routes": [{"selection_ratio": 0.7, "start_layer_idx": 1, "end_layer_idx": -1}]},
        {"routes": [{"selection_ratio": 0.6, "start_layer_idx": 2, "end_layer_idx": -3}]},
        {"tread_config": {"routes": [{"selection_ratio": 0.6, "start_layer_idx": 2, "end_layer_idx": -3}]}},
        {"tread_config": {"routes": [{"selection_ratio": 0.4, "start_layer_idx": 3, "end_layer_idx": -4}]}},
        {"tread_config": {"routes": [{"selection_ratio": 0.7, "start_layer_idx": 2, "end_layer_idx": -2}]}},
    ],
)
def test_documented_routes_are_accepted_as_they_stand(snippet: dict[str, Any], tmp_path: Path) -> None:
    """In the config, as a JSON string, and as a file that it names."""
    (tmp_path / "routes.json").write_text(json.dumps(snippet))
    forms = [snippet.get("tread_config", snippet), json.dumps(snippet), str(tmp_path / "routes.json"), snippet]
    plans = []
    for number, form in enumerate(forms):
        path = tmp_path / f"config-{number}.json"
        path.write_text(json.dumps({**BASE, "tread_config": form}))
        plan = read_config(path).plan()
        assert plan is not None
        plans.append(plan.resolve(57))
    assert plans == [plans[0]] * len(forms)
    assert [route.selection_ratio for route in plans[0].routes] == [
        route["selection_ratio"] for route in snippet.get("tread_config", snippet)["routes"]
    ]


def test_a_translated_config_is_its_own_translation() -> None:
    """What a run keeps can be read again."""
    first = translate({**BASE, "optimizer": "optimi-lion", "lora_type": "lycoris", "lycoris_config": LYCORIS})
    again = translate(first.settings)
    assert again.settings == first.settings
    assert {one.verdict for one in again.verdicts} == {"runs"}


def test_every_family_is_known_by_name() -> None:
    for name in TUNE_FAMILIES:
        assert family_class(name).name == name
        assert verdict({**BASE, "model_family": name}, "model_family").verdict == "runs"
    with pytest.raises(ConfigError):
        family_class("sdxl")


@pytest.mark.parametrize(
    ("given", "precision", "text"),
    [
        ("int8-torchao", "int8", "base_model_precision: int8 (our own int8; torchao is not used)"),
        ("int4-quanto", "int4", "base_model_precision: int4 (our own int4; quanto is not used)"),
        ("fp8wo-torchao", "fp8", "base_model_precision: fp8 (our own fp8; torchao is not used)"),
        ("fp8-torchao", "fp8-forward", "base_model_precision: fp8-forward (our own fp8-forward; torchao is not used)"),
        ("fp8-both-ways", "fp8-matmul", "base_model_precision: fp8-matmul"),
        ("nf4-bnb", "nf4", "base_model_precision: nf4"),
        ("int8-bnb", "int8-bnb", ""),
    ],
)
def test_precisions_of_other_trainers_and_of_earlier_runs(given: str, precision: str, text: str) -> None:
    translated = translate({**BASE, "base_model_precision": given})
    assert parse(FinetuneConfig, translated.settings).base_model_precision == precision
    assert verdict({**BASE, "base_model_precision": given}, "base_model_precision").text == text


@pytest.mark.parametrize("value", [["a"], {"a": 1}, [], -1, True, "", 1e400])
def test_a_value_of_any_type_has_a_verdict(value: object) -> None:
    """A rule that looks its value up in a table must not trip over a list."""
    for key in RULES:
        for theirs in ({}, {"data_backend_config": []}):
            assert key in {
                verdict.key.partition("[")[0] for verdict in translate({**BASE, **theirs, key: value}).verdicts
            }
