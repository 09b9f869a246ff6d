"""`tread doctor [CONFIG] [name=value ...]`: what this machine has, and whether a config works on it.

- A config is read before anything else, so that a mistake in it is one sentence at once.
- The report goes to stdout, as lines or as JSON; messages of the jobs while they load go to stderr.
- Nothing is written to a run's folder.
"""

import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tread.config.documents import find_recipe, read_document
from tread.config.jobs import job_of
from tread.errors import USER_ERRORS, ConfigError
from tread.report.machine import GIB, examine
from tread.words import timed

if TYPE_CHECKING:
    from tread.training.trial import Comparison, Measured, Trial


def doctor(config: str | None, settings: Sequence[str], as_json: bool) -> int:
    """Print the report; 0: nothing is wrong, 1: the config's model is not finite or differs from the stock model."""
    attempt = None if config is None and not settings else _job(config, settings)
    with redirect_stdout(sys.stderr):  # some libraries print when they are imported
        findings = list(examine())
    if not as_json:
        print(table([(finding.name, str(finding)) for finding in findings]), flush=True)
    report: dict[str, Any] = {"machine": [asdict(finding) for finding in findings]}
    problems: list[str] = []
    if attempt is not None:
        try:
            with tempfile.TemporaryDirectory(prefix="tread-doctor-") as folder, redirect_stdout(sys.stderr):
                summary, trials = attempt(Path(folder))
        except USER_ERRORS as error:
            if as_json:  # the machine's findings may explain the error
                print(_json(report | {"error": str(error)}))
            raise
        problems = [problem for trial in trials for problem in trial.problems]
        report["config"] = {
            "file": config,
            "settings": list(settings),
            "summary": summary,
            "networks": [asdict(trial) for trial in trials],
            "problems": problems,
        }
        if not as_json:
            print(f"\n{config or 'tread train'}, on one batch: {summary}")
            for trial in trials:
                print(f"\n{describe(trial)}")
            print(f"\n{_verdict(problems)}")
    if as_json:
        print(_json(report))
    return 1 if problems else 0


def _job(config: str | None, settings: Sequence[str]) -> Callable[[Path], tuple[str, list["Trial"]]]:
    """The trial of a config that has been read; without a file the settings are those of `tread train`."""
    if config is not None and is_finetune(config):
        from tread.finetune.config import read_config

        tune = read_config(config, settings)
        from tread.finetune.trial import try_finetune

        return lambda folder: try_finetune(tune, folder)
    from tread.pretrain.config import compose
    from tread.pretrain.trial import try_pretrain

    train = compose([*([] if config is None else [config]), *settings])
    return lambda folder: try_pretrain(train, folder)


def is_finetune(config: str) -> bool:
    """Whether a config is one of `tread finetune`; otherwise it is one of `tread train`."""
    document = read_document(find_recipe(Path(config)))
    if not isinstance(document, Mapping):
        raise ConfigError(f"{config} is not a mapping of settings; give a config of `tread train` or `tread finetune`.")
    job = job_of(document, config)
    if job is None:
        raise ConfigError(
            f"{config} is no config of a job: one of `tread finetune` has model_family, one of `tread train` has "
            "sections such as model, data and train."
        )
    return job == "finetune"


def describe(trial: "Trial") -> str:
    """The trial of one network, as lines of text."""
    rows = [(f"prediction {one.what}", _difference(one)) for one in trial.comparisons]
    if trial.dense is None:
        rows.append(("steps", "not run, because a prediction is wrong"))
        return f"{trial.part}\n{table(rows)}"
    rows.append(("dense step", f"{_step(trial.dense)}; the eager loss is {trial.eager_loss:.4g}"))
    if trial.routed is None:
        rows.append(("routed step", "none: the config has no tread_config; give it a preset such as lora"))
    else:
        rows.append(("routed step", _step(trial.routed)))
        kept = ", ".join(f"{count} of {trial.tokens}" for count in trial.kept) or "all"
        rows.append(("tokens kept", f"{trial.kept_share:.0%} in the routed layers ({kept})"))
        speed = trial.dense.seconds / trial.routed.seconds
        rows.append(("speed-up", f"{speed:.2f} measured in one step, {trial.flop_ratio:.2f} by FLOPs"))
    rows.append(("peak GPU memory", _memory(trial.dense, trial.routed)))
    return f"{trial.part}\n{table(rows)}"


def _memory(dense: "Measured", routed: "Measured | None") -> str:
    if dense.peak_bytes is None:
        return "not measured on a CPU, where step times mean little too"
    steps = {"dense": dense.peak_bytes, "routed": None if routed is None else routed.peak_bytes}
    return ", ".join(f"{size / GIB:.2f} GiB {name}" for name, size in steps.items() if size is not None)


def table(rows: Sequence[tuple[str, str]]) -> str:
    """A text table of two columns: names and descriptions."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name.ljust(width)}  {text}" for name, text in rows)


def _difference(one: "Comparison") -> str:
    if not math.isfinite(one.difference):
        return "NOT FINITE"
    if one.difference == 0:
        return f"equal to the {one.beside} model's, bit for bit"
    if one.limit is None:
        return f"relative difference {one.difference:.1e} to the {one.beside} model's, as quantizing brings"
    verdict = f"within {one.limit:g}" if one.fits else f"DIFFERENT: allowed is {one.limit:g}"
    return f"relative difference {one.difference:.1e} to the {one.beside} model's, {verdict}"


def _step(step: "Measured") -> str:
    finite = "finite" if step.finite else "NOT FINITE"
    return f"{finite}: loss {step.loss:.4g}, gradient norm {step.gradient_norm:.3g}; {timed(step.seconds)}"


def _verdict(problems: Sequence[str]) -> str:
    return "it does not work: " + "; ".join(problems) if problems else "it works"


def _json(report: Mapping[str, Any]) -> str:
    return json.dumps(_finite(report), indent=2, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    """A report with NaN and infinities replaced, which JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
