"""Recorded runs of two checkouts, compared bit by bit: `python -m benchmarks.same_runs BEFORE`, after a refactoring.

- Pretraining dense, routed, and with EDM, micro-steps and checkpointing; a resumed run; fine-tunes of two families, one
  of them resumed. Each is started by the command line of its checkout, in float32 on one thread.
- Every line of metrics but the speed, and every tensor of the last checkpoint, must be equal. Exits with 1 otherwise.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.tiny.pictures import write_noise
from tests.tiny.pipelines import TINY

HERE = Path(__file__).resolve().parents[1]
SMALL = [
    *["model.depth=6", "model.width=32", "model.heads=4", "train.batch_size=8", "train.steps=10", "sample.every=0"],
    *["validation.every=5", "validation.samples=32", "checkpoint.every=5", "log.every=1", "log.trackers=none"],
]
PRETRAINING = {
    "dense": [["model=dit"]],
    "routed": [["model=tread"]],
    "edm": [["model=tread", "objective=edm", "train.micro_steps=2", "train.checkpointing=true"]],
    "resumed": [["model=tread", "train.steps=5"], ["resume={run}", "train.steps=10"]],
}
FINETUNES = {
    "flux": [["max_train_steps=8"]],
    "sd3": [["max_train_steps=8"]],
    "flux-resumed": [["max_train_steps=4"], ["max_train_steps=8", "resume_from_checkpoint=latest"]],
}
SETTINGS: dict[str, Any] = {
    "tread_config": {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": 1}]},
    **{"resolution": 64, "resolution_type": "pixel_area", "mixed_precision": "no", "seed": 3, "lora_rank": 4},
    **{"train_batch_size": 2, "gradient_accumulation_steps": 2, "num_eval_images": 4, "eval_steps_interval": 4},
    **{"checkpoint_step_interval": 4, "logging_steps": 1, "report_to": "none"},
}


def record(checkout: Path, models: Path, out: Path) -> None:
    """Make all runs with the code of a checkout."""

    def tread(*arguments: str) -> None:
        environment = {"PYTHONPATH": str(checkout / "src"), "XDG_CACHE_HOME": str(out / "xdg"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tread", *arguments]
        subprocess.run(command, cwd=checkout, env=os.environ | environment, check=True, capture_output=True)

    for name, parts in PRETRAINING.items():
        for number, settings in enumerate(parts):
            given = [setting.format(run=out / name) for setting in settings]
            tread("train", *(given if number else [*SMALL, *given, f"output_dir={out / name}"]))
    for name, parts in FINETUNES.items():
        family = name.partition("-")[0]
        model = {"model_family": family, "pretrained_model_name_or_path": str(models / family)}
        config = out / f"{name}.json"
        folders = {"data": str(models / "data"), "cache_dir": str(out / "cache")}
        config.write_text(json.dumps({**SETTINGS, **model, **folders}))
        for settings in parts:
            tread("finetune", str(config), *settings, f"output_dir={out / name}")


def figures(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics without those that depend on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "images_per_second" not in line]


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the last checkpoint, by part and name."""
    parts = sorted(max((run / "checkpoints").iterdir()).glob("*.safetensors"))
    return {f"{part.stem}.{name}": tensor for part in parts for name, tensor in load_file(part).items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.same_runs", description=__doc__)
    parser.add_argument("before", type=Path, help="another checkout of the repository")
    parser.add_argument("after", type=Path, nargs="?", default=HERE, help="default: this one")
    given = parser.parse_args()
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_noise(work / "data")
        for family in ("flux", "sd3"):
            TINY[family](work / family)
        for name in ("before", "after"):
            (work / name).mkdir()
            record(getattr(given, name).resolve(), work, work / name)
        for run in (*PRETRAINING, *FINETUNES):
            one, other = (figures(work / name / run) for name in ("before", "after"))
            held, found = (tensors(work / name / run) for name in ("before", "after"))
            same = held.keys() == found.keys() and all(torch.equal(held[name], found[name]) for name in held)
            verdict = "equal" if one == other and same else "DIFFERENT"
            different += verdict != "equal"
            print(f"{run:14} {len(one):3} lines of figures, {len(held):3} tensors: {verdict}", flush=True)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
