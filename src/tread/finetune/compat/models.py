"""The model that a config names: by its family and flavour, where it has no path."""

from collections.abc import Mapping
from typing import Any

from tread.finetune.compat.rules import Outcome
from tread.finetune.families import TUNE_FAMILIES

MODELS: dict[str, dict[str, str]] = {
    "auraflow": {
        "v0.3": "terminusresearch/auraflow-v0.3",
        "v0.2": "fal/AuraFlow-v0.2",
        "v0.1": "fal/AuraFlow",
        "pony": "purplesmartai/pony-v7-base",
    },
    "cogvideox": {
        "5b": "THUDM/CogVideoX-5b",
        "2b": "THUDM/CogVideoX-2b",
        "5b-i2v": "THUDM/CogVideoX-5b-I2V",
        "1.5-5b": "THUDM/CogVideoX1.5-5B",
        "1.5-5b-i2v": "THUDM/CogVideoX1.5-5B-I2V",
    },
    "cosmos": {"2b": "nvidia/Cosmos-Predict2-2B-Text2Image", "14b": "nvidia/Cosmos-Predict2-14B-Text2Image"},
    "cosmos_video": {"2b": "nvidia/Cosmos-Predict2-2B-Video2World", "14b": "nvidia/Cosmos-Predict2-14B-Video2World"},
    "flux": {
        "krea": "black-forest-labs/FLUX.1-Krea-dev",
        "dev": "black-forest-labs/FLUX.1-dev",
        "schnell": "black-forest-labs/FLUX.1-schnell",
        "kontext": "black-forest-labs/FLUX.1-Kontext-dev",
        "fluxbooru": "terminusresearch/fluxbooru-v0.3",
        "libreflux": "jimmycarter/LibreFlux-SimpleTuner",
    },
    "hunyuanvideo": {
        "t2v-480p": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
        "t2v-720p": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v",
        "i2v-480p": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v",
        "i2v-720p": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_i2v",
    },
    "hunyuanvideo1": {"t2v": "hunyuanvideo-community/HunyuanVideo"},
    "ltxvideo": {
        "0.9.5": "Lightricks/LTX-Video-0.9.5",
        "0.9.0": "Lightricks/LTX-Video",
        "0.9.7-dev": "Lightricks/LTX-Video-0.9.7-dev",
    },
    "lumina2": {"2.0": "Alpha-VLLM/Lumina-Image-2.0", "neta-lumina": "terminusresearch/neta-lumina-v1"},
    "pixart_sigma": {
        "900M-1024-v0.6": "terminusresearch/pixart-900m-1024-ft-v0.6",
        "900M-1024-v0.7-stage1": "terminusresearch/pixart-900m-1024-ft-v0.7-stage1",
        "900M-1024-v0.7-stage2": "terminusresearch/pixart-900m-1024-ft-v0.7-stage2",
        "600M-512": "PixArt-alpha/PixArt-Sigma-XL-2-512-MS",
        "600M-1024": "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS",
        "600M-2048": "PixArt-alpha/PixArt-Sigma-XL-2-2K-MS",
        "1024-ms": "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS",
    },
    "qwen_image": {"v2.0": "Qwen/Qwen-Image-2512", "v1.0": "Qwen/Qwen-Image"},
    "sd3": {"medium": "stabilityai/stable-diffusion-3.5-medium", "large": "stabilityai/stable-diffusion-3.5-large"},
    "wan": {
        "t2v-480p-1.3b-2.1": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        "t2v-480p-14b-2.1": "Wan-AI/Wan2.1-T2V-14B-Diffusers",
        "i2v-14b-2.1": "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
        "flf2v-14b-2.1": "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers",
        "t2v-14b-2.2-high": "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
        "t2v-14b-2.2-low": "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
        "i2v-14b-2.2-high": "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
        "i2v-14b-2.2-low": "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
        "ti2v-5b-2.2": "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
    },
}
"""Family -> `model_flavour` -> the id on the hub, for configs without pretrained_model_name_or_path. The first flavour
is the one that the existing trainer takes where a config has none; that of wan is not known."""


def family(value: Any, config: Mapping[str, Any]) -> Outcome:
    """A family that `tread finetune` has, or where else to train it."""
    if value in TUNE_FAMILIES:
        return Outcome.runs(model_family=value)
    return Outcome.unsupported(
        f"tread finetune has {', '.join(TUNE_FAMILIES)}; other transformers train in a script of yours with "
        "tread.attach (docs/attach.md; `tread families` lists them)"
    )


def flavour(value: Any, config: Mapping[str, Any]) -> Outcome:
    """The flavour names the model if no path does, and the expert of Wan 2.2 that is trained."""
    if str(config.get("model_family")) not in TUNE_FAMILIES:
        return Outcome.ignored("model_family is none of tread finetune")
    models = MODELS.get(str(config.get("model_family")), {})
    settings: dict[str, Any] = {}
    if config.get("model_family") == "wan" and str(value).endswith(("-high", "-low")) and "experts" not in config:
        settings["experts"] = str(value).rpartition("-")[2]
    if config.get("pretrained_model_name_or_path") is None and value is not None:
        if str(value).startswith("edit"):
            return Outcome.unsupported("Qwen-Image-Edit is not tuned here; choose v2.0 or v1.0")
        if "distilled" in str(value):
            return Outcome.unsupported(f"distilled models are not tuned here; choose one of {', '.join(models)}")
        if str(value) not in models:  # a flavour such as 2.0 may have been read as a number
            known = f" ({', '.join(models)} are known)" if models else ""
            return Outcome.unsupported(f"write pretrained_model_name_or_path instead{known}")
        settings["pretrained_model_name_or_path"] = models[str(value)]
    return Outcome.translated(settings) if settings else Outcome.ignored("the flavour is read from the model itself")
