"""`python -m benchmarks.autotune predict | gaps | rank`."""

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import autotune as about
from benchmarks.autotune import predict, rank
from benchmarks.common.record import machine, write_json
from tread.autotune.jobs.job import read_job
from tread.autotune.measure import steady
from tread.autotune.rules import RATIOS
from tread.autotune.sensitivity import gap
from tread.autotune.subject import Subject
from tread.errors import RiskWarning


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the commands; 0, or 1 if a prediction misses its goal."""
    parser = argparse.ArgumentParser(description=about.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("predict", "gaps", "rank"))
    parser.add_argument("given", nargs="*", help="a config and settings; files of results, or paper")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--arms", nargs="+", default=[], help="with gaps: results whose arms are measured, or paper")
    parser.add_argument("--gaps", type=Path, help="with rank: what gaps wrote")
    parser.add_argument("--seconds", type=float, default=430.0, help="the length of the runs (default: %(default)g)")
    parser.add_argument("--start-steps", type=int, default=200, help="with gaps, where the weights are new")
    cpu = "with predict: the process's own time, for a CPU that others use"
    parser.add_argument("--cpu-time", action="store_true", help=cpu)
    options = parser.parse_intermixed_args(arguments)
    warnings.simplefilter("ignore", RiskWarning)
    command = " ".join(["python -m benchmarks.autotune", *(sys.argv[1:] if arguments is None else arguments)])
    facts: dict[str, Any] = {"command": command, "machine": machine()}
    if options.what == "rank":
        known = {} if options.gaps is None else json.loads(options.gaps.read_text())["gaps"]
        facts["figure"], arms = rank.long_runs(options.given, options.seconds)
        facts |= rank.correlate(arms, known)
        for name, one in facts["scores"].items():
            print(
                f"{name:<22} kendall {one['kendall']:+.2f}, spearman {one['spearman']:+.2f}, chance {one['chance']:.3f}"
            )
        print(facts["verdict"])
    else:
        config = options.given[0] if options.given and "=" not in options.given[0] else None
        settings = [text for text in options.given if text != config]
        if options.what == "predict":
            timer = steady(torch.device("cpu"), time.process_time) if options.cpu_time else None
            facts |= predict.measure(config, settings, timer=timer)
            for name, one in facts["plans"].items():
                told = f"predicted {one['predicted_speedup']:.3f}, timed {one['timed_speedup']:.3f}"
                print(f"{name:<28} {told} ({one['error']:+.1%})")
            print(f"worst {facts['worst']:.1%}, goal {facts['goal']:.0%}")
        else:
            _, arms = rank.long_runs(options.arms, options.seconds)
            facts |= measure_gaps(config, settings, arms, options.start_steps)
            print(json.dumps(facts["gaps"], indent=1))
    write_json(options.out, facts)
    return int(facts.get("worst", 0.0) > facts.get("goal", 1.0))


def measure_gaps(
    config: str | None, settings: Sequence[str], arms: Sequence[rank.Arm], start_steps: int
) -> dict[str, Any]:
    """The loss gap of each arm's routes on the model of a config, those that break a rule among them."""
    with tempfile.TemporaryDirectory(prefix="tread-autotune-") as name:
        subject = Subject(read_job(config, settings).open(Path(name), RATIOS))
        if subject.opened.start is not None:
            subject.start(start_steps, lambda steps: steps)
        with subject.evaluating():
            losses = {arm.name: subject.losses(arm.routes) for arm in arms if arm.routes}
        subject.loop.close()
        gaps = {name: gap(some) for name, some in losses.items()} | {arm.name: 0.0 for arm in arms if not arm.routes}
        return {"subject": subject.summary(), "start_steps": start_steps, "gaps": gaps, "losses": losses}


if __name__ == "__main__":
    raise SystemExit(main())
