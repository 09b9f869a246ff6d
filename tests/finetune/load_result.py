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
from typing import Any

import torch


def run(code: str, name: str) -> Any:
    """The pipeline that a program makes."""
    names: dict[str, Any] = {}
    exec(compile(code, name, "exec"), names)
    return names["pipeline"]


def clean_prompts_without_ftfy() -> None:
    """Cards say that Wan needs ftfy: its image-to-video pipeline cannot run without it, its other one can."""
    from diffusers.pipelines.wan import pipeline_wan, pipeline_wan_i2v

    if importlib.util.find_spec("ftfy") is None:
        pipeline_wan_i2v.prompt_clean = pipeline_wan.prompt_clean


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    importlib.import_module("tests.tiny.guardrail")  # a part of Cosmos here: diffusers imports none that a folder names
    clean_prompts_without_ftfy()
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
                output = getattr(pipeline, part).eval()(**known["call"])[0]
            off, moved = ((output - known[kind][part]).abs().max().item() for kind in ("trained", "base"))
            results.append({**entry, "part": part, "off": off, "moved": moved})
    assert "tread" not in sys.modules
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
