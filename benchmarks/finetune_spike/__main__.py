"""The command line of the experiment."""

import argparse
import json
from pathlib import Path

from . import __doc__


def main(arguments: list[str] | None = None) -> int:
    """`prepare`, `run`, `report` or `config`; 1 where a run is not done yet."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.finetune_spike",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser("prepare", help="write the pipeline and the images")
    prepare.add_argument("data", type=Path, help="the folder with emoji3d, wordllama, taesd and tokenizers")
    prepare.add_argument("out", type=Path)
    prepare.add_argument("--smoke", action="store_true", help="tiny, for a CPU")
    run = commands.add_parser("run", help="train what is not done yet")
    run.add_argument("out", type=Path)
    run.add_argument("--budget-seconds", type=float, default=540, help="stop after so long; repeat to go on")
    run.add_argument("--base-seconds", type=float, default=330, help="the base trains no longer than this")
    run.add_argument("--arms", nargs="+", help="the names of some arms; otherwise all")
    run.add_argument("--compile", action="store_true", help="compile the layers of the arms, as the base's are")
    report = commands.add_parser("report", help="draw the figures and print the table")
    report.add_argument("results", type=Path, help="OUT/results")
    report.add_argument("--json", type=Path, default=Path("benchmarks/results/finetune-spike.json"))
    report.add_argument("--figures", type=Path, default=Path("docs/finetune"))
    config = commands.add_parser(
        "config", help="write OUT/config.json, a LoRA on fresh weights, whose steps can be predicted"
    )
    config.add_argument("out", type=Path)
    given = parser.parse_args(arguments)
    return {"prepare": _prepare, "run": _run, "report": _report, "config": _config}[given.command](given)


def _prepare(given: argparse.Namespace) -> int:
    from .arms import SCALES
    from .prepare import prepare

    name = "smoke" if given.smoke else "h200"
    prepare(given.data, given.out, SCALES[name])
    (given.out / "scale.json").write_text(json.dumps(name))
    return 0


def _run(given: argparse.Namespace) -> int:
    from .arms import ARMS, SCALES
    from .run import run

    scale = SCALES[json.loads((given.out / "scale.json").read_text())]
    arms = [arm for arm in ARMS if given.arms is None or arm.name in given.arms]
    done = run(
        given.out,
        scale,
        budget=given.budget_seconds,
        base_seconds=given.base_seconds,
        arms=arms,
        compiled=given.compile,
    )
    print("all arms are done" if done else "out of time: run it again to go on")
    return 0 if done else 1


def _report(given: argparse.Namespace) -> int:
    from .report import report

    print(report(given.results, given.json, given.figures))
    return 0


def _config(given: argparse.Namespace) -> int:
    from .arms import SCALES
    from .run import write_prediction_config

    print(write_prediction_config(given.out, SCALES[json.loads((given.out / "scale.json").read_text())]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
