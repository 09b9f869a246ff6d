"""The command line of the experiment."""

import argparse
from pathlib import Path

from . import __doc__
from .arms import GUIDANCE

WORK = Path("runs/tuning")
KEPT = Path(__file__).parents[1] / "results"


def main(arguments: list[str] | None = None) -> int:
    """`captions`, `run`, `choose` or `report`; 1 where a run is not done yet."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tuning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    captions = commands.add_parser("captions", help="embed the class names")
    captions.add_argument("wordllama", type=Path)
    captions.add_argument("path", type=Path)
    run = commands.add_parser("run", help="train what is not done yet")
    run.add_argument("--work", type=Path, default=WORK, help="where `benchmarks.quality prepare` put the images")
    run.add_argument("--out", type=Path, help="the folder of results; `results` in that of --work")
    run.add_argument("--seeds", type=int, nargs="+", default=[0])
    run.add_argument("--base-seconds", type=float, default=540)
    run.add_argument("--seconds", type=float, default=90, help="training time of each arm")
    arms = ["lora-dense", "lora-0.25@3..-4", "lora-0.5@3..-4"]
    run.add_argument("--arms", nargs="*", default=arms, help="names, or chosen; without any, the base alone")
    run.add_argument("--rates", nargs="+", default=["3e-4", "1e-3", "3e-3"], help="learning rates in order, or `best`")
    run.add_argument("--chosen-by", type=Path, help="results of the seed that chose the rates")
    run.add_argument("--budget-seconds", type=float, default=570, help="begin nothing that would not fit")
    run.add_argument("--guidance", type=float, nargs="*", default=list(GUIDANCE), help="scales to sample at, if any")
    run.add_argument("--rehearse", action="store_true", help="only fill the compiler's cache, beside the base's run")
    run.add_argument("--compiled", action="store_true", help="count on a rehearsal when estimating times")
    run.add_argument("--plan", action="store_true", help="say what would be done and how long it takes")
    run.add_argument("--smoke", action="store_true", help="tiny, for a CPU")
    choose = commands.add_parser("choose", help="the window that the tuner proposes for the LoRA of the base")
    choose.add_argument("--work", type=Path, default=WORK)
    choose.add_argument("--target-speedup", type=float, default=1.2)
    choose.add_argument("--budget-minutes", type=float, default=6.0)
    choose.add_argument("--smoke", action="store_true", help="tiny, for a CPU")
    report = commands.add_parser("report", help="write the answer of docs/results.md")
    report.add_argument("results", type=Path, nargs="*", help="results of some seeds; all that are kept")
    report.add_argument("--docs", type=Path, default=Path("docs"), help="the folder of results.md")
    report.add_argument("--samples", type=Path, help="the folder of a run's samples, to draw them anew")
    given = parser.parse_args(arguments)
    if given.command == "captions":
        from .model import write_captions

        write_captions(given.wordllama, given.path)
        return 0
    if given.command == "run":
        from .run import run_all

        given.out = given.out or given.work / "results"
        given.out.mkdir(parents=True, exist_ok=True)
        done = run_all(given)
        if not (given.plan or given.rehearse):
            print("all arms are done" if done else "some arms are not done: run it again to go on")
        return 0 if done else 1
    if given.command == "choose":
        from .choose import choose

        choose(given)
        return 0
    from .report import report as write_report

    write_report(given.results or sorted(KEPT.glob("tuning-s?.json")), given.docs, given.samples)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
