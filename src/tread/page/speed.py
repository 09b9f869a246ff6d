"""Speed and memory: the speed-up that FLOPs predict, the measured speed-up, and peak memory.

The prediction is dense over routed FLOPs at the full ratio, as the run recorded it. The measured speed-up is the median
speed of logging intervals at the lowest share of tokens, over the median speed of dense ones: those of the same run if
its schedule has dense steps, else those of a dense run in the report whose SPEED_SETTINGS are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tread.page.figure import Bar, Bars
from tread.page.read import Run, is_number
from tread.words import counted

SPEED_SETTINGS = (
    *("model.", "data.", "train.batch_size", "train.micro_steps", "train.precision", "train.compile", "train.graphs"),
    *("train.attention", "train.checkpointing", "train.float8", "optimizer.name"),
    *("pretrained_model_name_or_path", "model_type", "lora_type", "lora_rank", "lora_targets", "base_model_precision"),
    *("train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "mixed_precision", "compile"),
    *("attention", "graphs", "optimizer", "use_ema", "tokenizer_max_length"),
)
"""Settings, and prefixes of settings, that affect the time of a step."""
EXCEPT = ("model.tread_config", "model.name", "model.weights", "tread_config")


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """Speed-ups of one routed run over dense."""

    run: int
    predicted: float | None
    measured: float | None
    means: str
    """What was compared, or why there is no measurement, in words."""


def speedups(runs: Sequence[Run]) -> list[Speedup]:
    """The speed-up of each run that has routed steps."""
    return [_speedup(runs, index) for index, run in enumerate(runs) if lowest_share(run) < 1]


def lowest_share(run: Run) -> float:
    """The share of tokens kept at the full ratio; 1 if the run is dense."""
    return min((kept for _, kept in run.values("tokens_kept")), default=1.0)


def _speedup(runs: Sequence[Run], index: int) -> Speedup:
    run, predicted = runs[index], runs[index].facts.get("speedup")
    routed, dense = laps(run, lowest_share(run)), laps(run, 1.0)
    means, measured = "", None
    if not routed:
        logged = run.values("images_per_second")
        means = "no stretch between two lines of speed was at one ratio" if logged else "no speed was logged yet"
    elif dense:
        means = f"the medians of {len(routed)} routed and {len(dense)} dense stretches of this run"
    else:
        beside = next((other for other in runs if lowest_share(other) == 1 and _comparable(run, other)), None)
        if beside is None:
            means = "it has no dense steps, and no dense run beside it that is otherwise alike; add one to the command"
        else:
            dense = laps(beside, 1.0)
            means = f"the medians of {counted(len(routed), 'stretch')} of this run and {len(dense)} of {beside.name}"
    if routed and dense:
        measured = median(routed) / median(dense)
    return Speedup(run=index, predicted=predicted if is_number(predicted) else None, measured=measured, means=means)


def laps(run: Run, share: float) -> list[float]:
    """Samples per second of the logging intervals whose steps all kept this share.

    The first interval includes compilation and counts only if there is no other.
    """
    speeds: list[tuple[bool, float]] = []
    inside: list[float] = []
    first = True
    for line in run.lines:
        if is_number(line.get("tokens_kept")):
            inside.append(line["tokens_kept"])
        if is_number(line.get("images_per_second")):
            if set(inside) == {share} and line["images_per_second"] > 0:
                speeds.append((first, line["images_per_second"]))
            inside, first = [], False
    later = [speed for is_first, speed in speeds if not is_first]
    return later or [speed for _, speed in speeds]


def _comparable(run: Run, other: Run) -> bool:
    """Whether two runs have the same device, token grid and SPEED_SETTINGS, apart from routes."""
    device = [(one.starts[-1].get("device"), one.processes) if one.starts else None for one in (run, other)]
    groups = tuple(name for name in SPEED_SETTINGS if name.endswith("."))
    every = run.settings.keys() | other.settings.keys()
    names = {name for name in every if name in SPEED_SETTINGS or name.startswith(groups)}
    alike = all(run.settings.get(n) == other.settings.get(n) for n in names if not n.startswith(EXCEPT))
    return alike and run.grid == other.grid and device[0] == device[1]


def speed_bars(found: Sequence[Speedup], runs: Sequence[Run]) -> Bars | None:
    """Predicted and measured speed-up of each routed run, beside the 1 of dense steps."""
    bars = []
    for one in found:
        name = f"{runs[one.run].name}, " if len(runs) > 1 else ""
        for word, value in (("by FLOPs", one.predicted), ("measured", one.measured)):
            if value is not None:
                pale = word != "measured"
                bars.append(Bar(name=f"{name}{word}", run=one.run, value=value, label=f"{value:.2f} x", pale=pale))
    if not bars:
        return None
    note = "Samples per second at the full ratio over those of dense steps; FLOPs are the ceiling."
    return Bars(key="speed-up", title="speed-up over dense, predicted and measured", bars=bars, note=note)


def memory_bars(runs: Sequence[Run]) -> Bars | None:
    """The peak memory of each run."""
    peaks = {index: max((gib for _, gib in run.values("memory_gib")), default=0.0) for index, run in enumerate(runs)}
    bars = [
        Bar(name=runs[index].name, run=index, value=peak, label=f"{peak:.3g} GiB")
        for index, peak in peaks.items()
        if peak
    ]
    note = "Allocated on the GPU, or resident in the process on a CPU; of the first process, where there are several."
    return Bars(key="memory", title="peak memory", bars=bars, note=note) if bars else None
