"""The model of a config without a path: the hub id for its family and flavour."""

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
    "chroma": {
        "base": "lodestones/Chroma1-Base",
        "hd": "lodestones/Chroma1-HD",
        "flash": "lodestones/Chroma1-Flash",
    },
    "cosmos": {"2b": "nvidia/Cosmos-Predict2-2B-Text2Image", "14b": "nvidia/Cosmos-Predict2-14B-Text2Image"},
    "cosmos_video": {"2b": "nvidia/Cosmos-Predict2-2B-Video2World", "14b": "nvidia/Cosmos-Predict2-14B-Video2World"},
    "cosmos3": {
        "nano": "nvidia/Cosmos3-Nano",
        "edge": "nvidia/Cosmos3-Edge",
        "super": "nvidia/Cosmos3-Super",
        "super-i2v": "nvidia/Cosmos3-Super-Image2Video",
        "super-t2i": "nvidia/Cosmos3-Super-Text2Image",
    },
    "flux": {
        "krea": "black-forest-labs/FLUX.1-Krea-dev",
        "dev": "black-forest-labs/FLUX.1-dev",
        "schnell": "black-forest-labs/FLUX.1-schnell",
        "kontext": "black-forest-labs/FLUX.1-Kontext-dev",
        "fluxbooru": "terminusresearch/fluxbooru-v0.3",
        "libreflux": "jimmycarter/LibreFlux-SimpleTuner",
    },
    "flux2": {
        "klein-9b": "black-forest-labs/FLUX.2-klein-base-9B",
        "klein-4b": "black-forest-labs/FLUX.2-klein-base-4B",
        "dev": "black-forest-labs/FLUX.2-dev",
    },
    "hunyuanvideo": {
        "t2v-480p": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
        "t2v-720p": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v",
        "i2v-480p": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v",
        "i2v-720p": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_i2v",
    },
    "hunyuanvideo1": {
        "t2v": "hunyuanvideo-community/HunyuanVideo",
        "i2v": "hunyuanvideo-community/HunyuanVideo-I2V",
        "i2v-33ch": "hunyuanvideo-community/HunyuanVideo-I2V-33ch",
    },
    "ltxvideo": {
        "0.9.5": "Lightricks/LTX-Video-0.9.5",
        "0.9.0": "Lightricks/LTX-Video",
        "0.9.7-dev": "Lightricks/LTX-Video-0.9.7-dev",
    },
    "ltxvideo2": {
        "dev": "Lightricks/LTX-2",
        "2.3-dev": "dg845/LTX-2.3-Diffusers",
    },
    "hidream": {
        "full": "HiDream-ai/HiDream-I1-Full",
        "dev": "HiDream-ai/HiDream-I1-Dev",
        "fast": "HiDream-ai/HiDream-I1-Fast",
    },
    "krea2": {"raw": "krea/Krea-2-Raw", "turbo": "krea/Krea-2-Turbo"},
    "kandinsky5_image": {
        "t2i-lite-sft": "kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers",
        "t2i-lite-pretrain": "kandinskylab/Kandinsky-5.0-T2I-Lite-pretrain-Diffusers",
        "i2i-lite-sft": "kandinskylab/Kandinsky-5.0-I2I-Lite-sft-Diffusers",
        "i2i-lite-pretrain": "kandinskylab/Kandinsky-5.0-I2I-Lite-pretrain-Diffusers",
    },
    "kandinsky5_video": {
        "t2v-lite-sft-5s": "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers",
        "t2v-lite-pretrain-5s": "kandinskylab/Kandinsky-5.0-T2V-Lite-pretrain-5s-Diffusers",
        "t2v-lite-sft-10s": "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-10s-Diffusers",
        "t2v-lite-pretrain-10s": "kandinskylab/Kandinsky-5.0-T2V-Lite-pretrain-10s-Diffusers",
        "t2v-pro-sft-5s-hd": "kandinskylab/Kandinsky-5.0-T2V-Pro-sft-5s-Diffusers",
        "t2v-pro-sft-10s-hd": "kandinskylab/Kandinsky-5.0-T2V-Pro-sft-10s-Diffusers",
        "t2v-pro-pretrain-5s-hd": "kandinskylab/Kandinsky-5.0-T2V-Pro-pretrain-5s-Diffusers",
        "t2v-pro-pretrain-10s-hd": "kandinskylab/Kandinsky-5.0-T2V-Pro-pretrain-10s-Diffusers",
        "i2v-lite-5s": "kandinskylab/Kandinsky-5.0-I2V-Lite-5s-Diffusers",
        "i2v-pro-sft-5s": "kandinskylab/Kandinsky-5.0-I2V-Pro-sft-5s-Diffusers",
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
    "qwen_image": {
        "v2.0": "Qwen/Qwen-Image-2512",
        "v1.0": "Qwen/Qwen-Image",
        "edit-v1": "Qwen/Qwen-Image-Edit",
        "edit-v2": "Qwen/Qwen-Image-Edit-2509",
        "edit-v2+": "Qwen/Qwen-Image-Edit-2509",
        "edit-v3": "Qwen/Qwen-Image-Edit-2511",
    },
    "qwen_image21": {"v2.1": "Qwen/Qwen-Image-2.1"},
    "qwen_layered": {"v1.0": "Qwen/Qwen-Image-Layered"},
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
    "z_image": {"base": "Tongyi-MAI/Z-Image", "turbo": "Tongyi-MAI/Z-Image-Turbo"},
}
"""Family -> `model_flavour` -> the id on the hub, for configs without pretrained_model_name_or_path. The first flavour
is the existing trainer's default; its default for wan is not known."""
ASSISTED = {"z_image": ("turbo-ostris-v2", "ostris-de-turbo")}
"""Flavours that the existing trainer trains on top of an assistant's adapter; the first is the family's default."""


def family(value: Any, config: Mapping[str, Any]) -> Outcome:
    """model_family: one of TUNE_FAMILIES; for others the advice is `tread.attach`."""
    if value in TUNE_FAMILIES:
        return Outcome.runs(model_family=value)
    return Outcome.unsupported(
        f"tread finetune has {', '.join(TUNE_FAMILIES)}; other transformers train in a script of yours with "
        "tread.attach (docs/attach.md; `tread families` lists them)"
    )


def flavour(value: Any, config: Mapping[str, Any]) -> Outcome:
    """model_flavour chooses the model if the config has no path, and the trained expert of Wan 2.2."""
    if str(config.get("model_family")) not in TUNE_FAMILIES:
        return Outcome.ignored("model_family is none of tread finetune")
    models = MODELS.get(str(config.get("model_family")), {})
    if value in ASSISTED.get(str(config.get("model_family")), ()):
        return Outcome.unsupported(
            f"it puts an assistant's adapter on the model, which is not done here; choose {' or '.join(models)}"
        )
    settings: dict[str, Any] = {}
    if config.get("model_family") == "wan" and str(value).endswith(("-high", "-low")) and "experts" not in config:
        settings["experts"] = str(value).rpartition("-")[2]
    if config.get("pretrained_model_name_or_path") is None and value is not None:
        if "distilled" in str(value):
            return Outcome.unsupported(f"distilled models are not tuned here; choose one of {', '.join(models)}")
        if str(value) not in models:  # str: a flavour such as 2.0 may have been parsed as a number
            known = f" ({', '.join(models)} are known)" if models else ""
            return Outcome.unsupported(f"write pretrained_model_name_or_path instead{known}")
        settings["pretrained_model_name_or_path"] = models[str(value)]
    return Outcome.translated(settings) if settings else Outcome.ignored("the flavour is read from the model itself")
