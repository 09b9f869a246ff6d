"""The commands for any model and either job: `plan`, `report`, `families`, `doctor`, `autotune`."""

import argparse
import sys
from pathlib import Path

from tread.commands import make_parser
from tread.terminal import no_loading_bars


def plan(arguments: list[str]) -> None:
    """show what routes cost, what speed-up they allow and what memory a run needs"""
    parser = make_parser("plan", plan)
    parser.usage = "tread plan MODEL [options]\n       tread plan ROUTES --depth N --width N --tokens N [--context N]"
    add = parser.add_argument
    add("subject", metavar="MODEL", help="a model such as flux, sd3/large or dit/XL/2; or routes, with --depth")
    add("--routes", help="a preset, a JSON string, or a JSON or YAML file (default: lora for adapters, else paper)")
    add("--resolution", help="a side in pixels, or WIDTHxHEIGHT (default: the model's usual one)")
    add("--frames", type=int, help="frames of a clip, for models of videos")
    add("--references", type=int, default=0, help="reference images of a sample, for edit models")
    add("--image-layers", type=int, help="layers that an image is taken apart into, for qwen_layered (default: 4)")
    add("--batch", type=int, help="samples per GPU and forward (default: 1; 256 for models from scratch)")
    add("--text", type=int, help="text tokens (default: those that the model's pipeline reads)")
    add("--lora", type=int, metavar="RANK", help="rank of the adapter (default: 16)")
    add("--targets", choices=("own", "attention"), help="linears that get it (default: the family's own)")
    add("--full", action="store_true", help="train all weights instead of an adapter")
    add("--precision", help="of the base: bf16, int8, fp8, int4, nf4, ... (default: bf16; fp32 with --full)")
    add("--optimizer", default="adamw", help="as in a config, e.g. adamw-8bit, lion, prodigy (default: %(default)s)")
    add(
        "--checkpointing",
        nargs="?",
        const="full",
        default="none",
        choices=("none", "selective", "full", "dense"),
        help="of activations; alone it means full; dense: in dense steps (default: %(default)s)",
    )
    add("--graphs", action="store_true", help="with CUDA graphs, which hold memory of their own")
    add("--offload", metavar="N|auto", help="layers in host memory; auto: as few as the smallest card needs")
    add("--ema", action=argparse.BooleanOptionalAction, help="a moving average (default: for models from scratch)")
    add("--gpus", type=int, metavar="N", help="also the memory and time of a step on each of N GPUs")
    add("--per-node", type=int, metavar="N", help="of them in one machine (default: 8)")
    add("--parallel", choices=("ddp", "fsdp", "hsdp"), help="how they share the model (default: ddp)")
    add("--shard-size", type=int, metavar="N", help="with hsdp: GPUs that share one copy (default: a machine's)")
    add(
        "--collectives",
        type=Path,
        nargs="+",
        default=(),
        metavar="FILE",
        help="tables of benchmarks.collectives (default: links of H200 machines, assumed)",
    )
    add("--json", action="store_true", help="print everything as JSON")
    add("--html", type=Path, metavar="PAGE", help="write a page to try other settings, in one file, for any browser")
    add("--depth", type=int, help="with routes alone: layers of the model")
    add("--width", type=int, help="with routes alone: width of the stream")
    add("--tokens", type=int, help="with routes alone: image tokens")
    add("--context", type=int, help="with routes alone: text tokens that join attention (default: 0)")
    options = vars(parser.parse_args(arguments))
    shape = {name: options.pop(name) for name in ("depth", "width", "tokens")}
    subject, context = options.pop("subject"), options.pop("context")
    given = [value is not None for value in shape.values()]
    from tread.report.plan import describe_plan, plan_model

    if not any(given):
        if context is not None:
            parser.error("--context is for routes alone, with --depth, --width and --tokens; a model has --text")
        print(plan_model(subject, **options))
        return
    if not all(given):
        parser.error("routes alone need --depth, --width and --tokens")
    for name, value in options.items():
        if value != parser.get_default(name):
            option = f"--{name.replace('_', '-')}"
            parser.error(f"{option} is for a model by name; routes alone take --depth, --width, --tokens and --context")
    print(describe_plan(subject, **shape, context=context or 0))


def report(arguments: list[str]) -> None:
    """show runs as one page: curves, pictures, tokens kept, settings"""
    parser = make_parser("report", report)
    about = "the folder of a run, or what `tread eval` left: its --work folder, or the JSON it printed"
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help=about)
    default = "report.html, in the run's folder if there is one run"
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"where to write the page (default: {default})")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="also write each figure as a PNG, with matplotlib")
    options = parser.parse_args(arguments)
    from tread.page.write import write_report

    print(write_report(options.runs, options.out))
    if options.png is not None:
        from tread.page.png import write_pngs

        for path in write_pngs(options.runs, options.png):
            print(path)


def families(arguments: list[str]) -> None:
    """show which diffusers models can be routed"""
    parser = make_parser("families", families)
    parser.add_argument("word", nargs="?", default="", help="only classes with this in their name")
    from tread.report.families import describe_families

    print(describe_families(**vars(parser.parse_args(arguments))))


def doctor(arguments: list[str]) -> None:
    """check this machine, and one dense and one routed step of a config"""
    parser = make_parser("doctor", doctor)
    parser.usage = "tread doctor [--json] [CONFIG] [name=value ...]"
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="a config of `tread train` or `tread finetune`")
    parser.add_argument("settings", nargs="*", metavar="name=value", help="settings that replace the config's")
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON, for a bug report")
    parser.epilog = (
        "Without a config: what this machine has, what it falls back to, and the versions beside those tested. With "
        "one: the model is loaded as the job would load it, its prediction on a real batch is compared with the stock "
        "model's own, and one dense and one routed step are run and timed. Nothing is written to the run's folder. "
        "Exit status: 0 nothing is wrong, 1 something is not finite or differs from the stock model, 2 it could not "
        "be tried."
    )
    options = parser.parse_intermixed_args(arguments)
    config, given = _file_first(options.config, options.settings)
    from tread.report.doctor import doctor as run
    from tread.report.doctor import is_finetune

    if config is not None and is_finetune(config):
        no_loading_bars()
    if code := run(config, given, options.json):
        sys.exit(code)


def autotune(arguments: list[str]) -> None:
    """choose routes for a config by measurements on its model, data and device"""
    parser = make_parser("autotune", autotune)
    goals = "--target-speedup X | --max-loss-gap Y | --pareto"
    parser.usage = f"tread autotune [CONFIG] [name=value ...] ({goals}) [options]"
    add = parser.add_argument
    add("config", nargs="?", metavar="CONFIG", help="a config of `tread train` or `tread finetune`")
    add("settings", nargs="*", metavar="name=value", help="settings that replace the config's")
    goal = parser.add_mutually_exclusive_group(required=True)
    goal.add_argument("--target-speedup", type=float, metavar="X", help="steps X times as fast, at the least loss gap")
    goal.add_argument("--max-loss-gap", type=float, metavar="Y", help="the fastest with at most this gap, e.g. 0.02")
    goal.add_argument("--pareto", action="store_true", help="the whole front; the routes written are its knee")
    add("--out", type=Path, metavar="FOLDER", help="for all files (default: autotune/CONFIG); a stopped tuning goes on")
    add("--budget-minutes", type=float, default=30.0, metavar="N", help="for measuring (default: %(default)g)")
    add("--verify", type=float, metavar="N", help="then train finalists and dense, N minutes all together")
    ratios = "fractions of tokens to try dropping (default: 0.25,0.4,0.5,0.6,0.75 as far as the rules allow)"
    add("--ratios", metavar="A,B,...", help=ratios)
    add("--edges", type=int, default=8, metavar="N", help="layers where windows begin and end (default: %(default)s)")
    add("--windows", type=int, default=2, metavar="N", help="windows of a plan, at most (default: %(default)s)")
    start = "dense steps before sensitivity is measured, if the weights are new (default: %(default)s)"
    add("--start-steps", type=int, default=200, metavar="N", help=start)
    parser.epilog = "docs/autotune.md says how it measures, and what its figures do not tell."
    options = vars(parser.parse_intermixed_args(arguments))
    options["config"], options["settings"] = _file_first(options["config"], options["settings"])
    from tread.autotune.goal import Goal, Options
    from tread.autotune.rules import parse_ratios
    from tread.report.doctor import is_finetune

    goal = Goal(speedup=options.pop("target_speedup"), gap=options.pop("max_loss_gap"))
    del options["pareto"]
    if options["config"] is not None and is_finetune(options["config"]):
        no_loading_bars()
    from tread.autotune.run import autotune as run

    ratios, verify = parse_ratios(options.pop("ratios")), options.pop("verify")
    run(Options(goal=goal, ratios=ratios, verify_minutes=verify, **options))


def _file_first(config: str | None, settings: list[str]) -> tuple[str | None, list[str]]:
    """The file and the settings of a command line; like `tread train`, it needs no file."""
    return (None, [config, *settings]) if config is not None and "=" in config else (config, settings)
