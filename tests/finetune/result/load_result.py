"""Run in a process without tread: does what a model card says and tells how far the transformers' outputs are off.

The card's program runs as it stands; its first part runs again in float32, which can be compared.
The argument is a folder with `manifest.json`, a list of {"folder", "parts"}. Each folder is a result; `expected.pt` in
it holds a call of the transformer, what the trained ones answered and what the base answers.
"""

import importlib
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


def run(code: str, name: str) -> Any:
    """The pipeline that a program makes."""
    names: dict[str, Any] = {}
    exec(compile(code, name, "exec"), names)
    return names["pipeline"]


def answer(model: Any, call: dict[str, Any]) -> torch.Tensor:
    """What a transformer answers; Z-Image's is a list."""
    output = model(**call)[0]
    return torch.stack(output) if isinstance(output, list) else output


def clean_prompts_without_ftfy() -> None:
    """Cards say that Wan and PRX need ftfy; the prompts here need no fixing."""
    importlib.import_module("transformers.models.t5gemma.modeling_t5gemma")  # as PRX's card does, before diffusers
    from diffusers.pipelines.prx import pipeline_prx
    from diffusers.pipelines.wan import pipeline_wan, pipeline_wan_i2v

    if importlib.util.find_spec("ftfy") is None:
        pipeline_wan_i2v.prompt_clean = pipeline_wan.prompt_clean
        pipeline_prx.__dict__["ftfy"] = SimpleNamespace(fix_text=lambda text: text)


def small_images_without_torchvision() -> None:
    """Cards say that Qwen-Image-Edit needs torchvision, for videos; its references would be scaled to a megapixel."""
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.tiny.pipelines import qwen_image, qwen_image21

    qwen_image.qwen_processor()
    qwen_image21.processor()


def draw_small() -> None:
    """HiDream draws every image at the area of a square of 128 latents, which its tiny model has no tokens for."""
    from diffusers.pipelines.hidream_image.pipeline_hidream_image import HiDreamImagePipeline

    cls: Any = HiDreamImagePipeline
    cls.default_sample_size = property(lambda _: 9.8, lambda _, value: None)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parents[3]))
    importlib.import_module("tests.tiny.guardrail")  # a part of Cosmos here: diffusers imports none that a folder names
    clean_prompts_without_ftfy()
    small_images_without_torchvision()
    draw_small()
    results: list[dict[str, Any]] = []
    for entry in json.loads((folder / "manifest.json").read_text()):
        os.chdir(entry["folder"])
        (code,) = re.findall(r"```python\n(.*?)```", Path("README.md").read_text(), flags=re.DOTALL)
        run(code, entry["folder"])
        loading = re.split(r"(?m)^\w+ = pipeline\(", code)[0]
        pipeline = run(loading.replace("torch.bfloat16", "torch.float32"), entry["folder"])
        known = torch.load("expected.pt", weights_only=True)
        for part in entry["parts"]:
            with torch.no_grad():
                output = answer(getattr(pipeline, part).eval(), known["call"])
            off, moved = ((output - known[kind][part]).abs().max().item() for kind in ("trained", "base"))
            results.append({**entry, "part": part, "off": off, "moved": moved})
    assert "tread" not in sys.modules
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
