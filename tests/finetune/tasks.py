"""A fine-tuning task on a tiny pipeline, without the loop around it."""

from pathlib import Path
from typing import Any

from accelerate import Accelerator

import tread
from tests.tiny.runs import forget
from tread.finetune.data.prepare import prepare
from tread.finetune.preflight import open_model
from tread.finetune.run import load_models
from tread.finetune.settings import FinetuneConfig
from tread.finetune.task import Finetuning

ROUTES = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": -2}], "schedule": None}


def make_config(place: Path, data: Any, **changes: Any) -> FinetuneConfig:
    settings: dict[str, Any] = {
        "model_family": "flux",
        "pretrained_model_name_or_path": str(place),
        "data": data if isinstance(data, dict) else {"instance_data_dir": str(data), "resolution": 64},
        "cache_dir": "cache" if isinstance(data, dict) else str(Path(data).parent / "cache"),
        "mixed_precision": "no",
        "train_batch_size": 2,
        "caption_dropout_probability": 0.0,
        "num_eval_images": 1,
        "tread_config": ROUTES,
    }
    return FinetuneConfig(**(settings | changes))


def make_task(config: FinetuneConfig, folder: Path, accelerator: Accelerator | None = None) -> Finetuning:
    if accelerator is None:
        forget()  # one of an earlier test may be on the GPU
        accelerator = Accelerator(cpu=True)
    family = open_model(config)
    data = prepare(config, family, accelerator, folder)
    models = load_models(config, family, accelerator.device)
    handles: Any = {
        part: tread.attach(model, ROUTES) if config.tread_config else None for part, model in models.items()
    }
    return Finetuning(config, accelerator, folder, family=family, models=models, handles=handles, data=data)
