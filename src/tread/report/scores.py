"""`tread eval`: compute the metrics, on one process or several, and print them."""

import os
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Any

import torch

from tread.errors import ConfigError
from tread.evaluate.compare import evaluate
from tread.evaluate.features import load_extractor, settings_called
from tread.files import write_text
from tread.page.read import FIGURES
from tread.together import together
from tread.training.ranks import check_launched, lost_ranks
from tread.training.record import origin


def run_evaluation(
    *,
    samples: Path,
    ref: Path | None,
    features: str,
    weights: str | None,
    save: Path | None,
    device: str | None,
    json: bool,
    **options: Any,
) -> None:
    """Print a table or JSON, on rank 0 only; `accelerate launch fid.py ...` starts several processes.

    `options` are those of `evaluate.compare.evaluate`.
    """
    chosen = _device(device)
    rank, processes = 0, 1
    with lost_ranks():
        if os.environ.get("WORLD_SIZE", "1") != "1":
            from accelerate import PartialState

            check_launched()
            state = PartialState(cpu=chosen.type == "cpu")
            rank, processes, chosen = state.process_index, state.num_processes, state.device or chosen
        with settings_called("--{}"), together():
            report = evaluate(samples, ref, load_extractor(features, weights, chosen), save=save, **options)
    if save is not None and rank == 0 and not json:
        print(f"saved: {save}")
    if report is not None and rank == 0:
        if (work := options.get("work")) is not None:
            known = asdict(report) | {
                "paths": {"samples": str(samples), "ref": str(ref)},
                "start": origin(chosen, processes),
            }
            write_text(work / FIGURES, dumps(known, indent=2) + "\n")
        print(dumps(asdict(report), indent=2) if json else report.table())


def _device(name: str | None) -> torch.device:
    """The extractor's device; refuses one that is not available."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):  # torch built without CUDA raises an AssertionError
        raise ConfigError(f"--device is {name!r}, which is not there; use cpu, or leave it out.") from None
    return device
