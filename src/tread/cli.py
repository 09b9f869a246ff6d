"""The command `tread`: one table from subcommand to function.

A mistake of the user's ends in one sentence on stderr and exit code 2; with TREAD_DEBUG=1 in the environment the
traceback is shown. A run that a signal stopped ends with 128 plus the signal's number.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tread import __version__
from tread.errors import USER_ERRORS, Stopped
from tread.terminal import no_loading_bars, quiet_libraries


def train(arguments: list[str]) -> None:
    """train a model from scratch, dense or routed"""
    if {"-h", "--help"} & set(arguments):
        from tread.report.settings import train_help

        print(train_help())
        return
    from tread.pretrain.config import compose
    from tread.pretrain.run import pretrain

    pretrain(compose(arguments))


def finetune(arguments: list[str]) -> None:
    """tune a released model, dense or routed"""
    parser = _parser("finetune", finetune)
    parser.usage = "tread finetune [--check [--json]] FILE [key=value ...]"
    help_text = "a JSON, YAML, TOML or .env config; `tread init` writes one"
    parser.add_argument("config", metavar="FILE", type=Path, help=help_text)
    parser.add_argument("settings", nargs="*", default=[], metavar="key=value", help="settings that replace the file's")
    parser.add_argument("--check", action="store_true", help="judge every key, the model and the data; train nothing")
    parser.add_argument("--json", action="store_true", help="with --check: as JSON, for scripts")
    parser.epilog = "docs/finetune.md lists every key with its default."
    options = parser.parse_intermixed_args(arguments)
    from tread.finetune import config

    if options.check:
        sys.exit(config.check(options.config, options.json, options.settings))
    if options.json:
        parser.error("--json goes with --check")
    settings = config.read_config(options.config, options.settings)
    no_loading_bars()
    from tread.finetune.run import finetune as run

    run(settings)


def init(arguments: list[str]) -> None:
    """write a config to start fine-tuning with"""
    from tread.finetune.families import TUNE_FAMILIES
    from tread.finetune.starter import starter_config

    parser = _parser("init", init)
    parser.add_argument("family", choices=list(TUNE_FAMILIES))
    parser.add_argument("--model", required=True, help="the base model in diffusers format: a folder or a hub id")
    parser.add_argument("--data", required=True, help="a folder of images or videos with captions")
    parser.add_argument(
        "--scratch", action="store_true", help="train a new transformer instead of a LoRA of the model's"
    )
    print(starter_config(**vars(parser.parse_args(arguments))), end="")


def data(arguments: list[str]) -> None:
    """show the data of a fine-tune by bucket: captions, masks, what is left out"""
    parser = _parser("data", data)
    parser.usage = "tread data [--html PAGE [--most N]] CONFIG [key=value ...]"
    add = parser.add_argument
    add("config", metavar="CONFIG", type=Path, help="a config of `tread finetune`")
    add("settings", nargs="*", default=[], metavar="key=value", help="settings that replace the file's")
    add(
        "--html", type=Path, metavar="PAGE", help="write thumbnails with captions and masks as one file for any browser"
    )
    add("--most", type=int, default=300, metavar="N", help="samples on the page, about (default: %(default)s)")
    options = parser.parse_intermixed_args(arguments)
    if options.most < 1:
        parser.error("--most must be at least 1")
    from tread.finetune.config import read_config
    from tread.finetune.data.survey import described, survey

    found = survey(read_config(options.config, options.settings))
    print(described(found))
    if options.html is not None:
        from tread.finetune.data.page import write_page

        command = shlex.join(["tread", "data", *arguments])
        heading = f"The data of {options.config.name}"
        print(write_page(options.html, found, heading=heading, command=command, most=options.most))


def export(arguments: list[str]) -> None:
    """make the result of a fine-tune again, from any of its checkpoints"""
    parser = _parser("export", export)
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="the folder of a run of `tread finetune`")
    add("--step", type=int, metavar="N", help="the checkpoint after N steps (default: the newest)")
    add("--best", action="store_true", help="the checkpoint of the lowest dense validation loss")
    add("--out", type=Path, metavar="FOLDER", help="where to write it (default: RUN, in place of the result there)")
    add("--layout", choices=("comfyui", "kohya"), help="write the LoRA under the names that these programs read")
    add("--merge", action="store_true", help="write whole transformers, with the adapter merged into their weights")
    add("--dtype", choices=("fp32", "bf16", "fp16"), help="precision of what is written (default: the run's)")
    options = parser.parse_args(arguments)
    no_loading_bars()
    from tread.finetune.result.export import export as run

    for path in run(**vars(options)):
        print(path)


def sample(arguments: list[str]) -> None:
    """draw images from a trained run"""
    parser = _parser("sample", sample)
    add = parser.add_argument
    add("run", type=Path, help="the folder of a run, or of one of its checkpoints")
    add("--classes", help="class labels or names, e.g. 0-9 or 1,5,cat (default: the first ten)")
    add("--per-class", type=int, help="images per class (default: 8)")
    add("--guidance", type=float, help="guidance scale; 1: none (default: the run's)")
    add("--interval", type=float, nargs=2, metavar=("LOW", "HIGH"), help="guide only in these levels")
    add(
        "--guidance-kind",
        choices=("cfg", "sg", "cfg+sg", "ag", "ag+sg"),
        help="what the weak branch lacks: its label (cfg), tokens (sg), training (ag) (default: the run's)",
    )
    add("--strong-ratio", type=float, help="tokens the strong branch drops (default: the run's)")
    add("--weak-ratio", type=float, help="tokens the weak branch drops, with sg (default: the run's)")
    add(
        "--ratio-schedule",
        choices=("constant", "cosine"),
        help="cosine: both ratios fall to 0 along the way (default: the run's)",
    )
    add("--weak", type=Path, metavar="RUN", help="with ag: a run or an earlier checkpoint's folder")
    add("--steps", type=int, help="solver steps (default: the run's)")
    add("--solver", choices=("euler", "heun"), help="default: the run's")
    add("--churn", type=float, help="EDM's S_churn: fresh noise added along the way; 0: none (default: the run's)")
    levels = ("LOW", "HIGH")
    add("--churn-interval", type=float, nargs=2, metavar=levels, help="EDM's S_tmin and S_tmax (default: the run's)")
    add("--churn-noise", type=float, help="EDM's S_noise (default: the run's)")
    add("--seed", type=int, help="seed of all images (default: 0)")
    add("--seeds", metavar="RANGE", help="one image per seed, e.g. 0-49999; classes take turns (default: all of them)")
    add("--batch-size", type=int, default=64, help="(default: %(default)s)")
    add("--no-ema", dest="averaged", action="store_false", help="the trained weights, not their average")
    add("--vae", help="autoencoder (folder or hub id) that decodes a latent run's samples (default: the run's)")
    add("--out", type=Path, help="folder for the PNGs and grid.png (default: RUN/generated)")
    from tread.pretrain.sample import sample_run

    grid = sample_run(**vars(parser.parse_args(arguments)))
    print(f"grid: {grid}")


def evaluate(arguments: list[str]) -> None:
    """compare images with a reference: FID and other figures"""
    parser = _parser("eval", evaluate)
    add = parser.add_argument
    add("samples", type=Path, help="a folder of images, a .tar or an .npz")
    add("--ref", type=Path, help="the reference: the same, or an .npz with mu and sigma")
    add("--features", default="inception", help="inception, efflite0 or dinov2 (default: inception, for FID)")
    add("--weights", help="the extractor's weights: a file or URL (dinov2: a folder or hub id)")
    add("--batch-size", type=int, default=64, help="(default: %(default)s)")
    add("--count", type=int, metavar="N", help="only the first N images of SAMPLES")
    add("--frechet-only", action="store_true", help="no precision, recall, KID: keeps no features")
    add("--work", type=Path, help="folder for what was measured: an interrupted run goes on there")
    add("--save", type=Path, metavar="FILE.npz", help="write the samples as a reference batch")
    add("--device", help="default: cuda where there is one")
    add("--json", action="store_true", help="print JSON instead of a table")
    options = vars(parser.parse_args(arguments))
    if options["ref"] is None and options["save"] is None:
        parser.error("give --ref, or --save to write a reference")
    from tread.report.scores import run_evaluation

    run_evaluation(**options)


def encode(arguments: list[str]) -> None:
    """turn a folder of images into latent shards"""
    parser = _parser("encode", encode)
    add = parser.add_argument
    add("images", type=Path, help="a folder of images, one subfolder per class")
    add("--vae", required=True, help="a diffusers autoencoder: local folder or hub id")
    add("--out", type=Path, required=True, help="folder for the tars; an interrupted run goes on there")
    add("--size", type=int, default=256, help="pixels, square (default: %(default)s)")
    add("--batch-size", type=int, default=16, help="(default: %(default)s)")
    add("--kind", choices=("moments", "sample"), default="moments", help="(default: %(default)s)")
    add("--shard-size", type=int, default=1000, help="images per tar (default: %(default)s)")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="precision of the VAE (default: %(default)s)",
    )
    add("--seed", type=int, default=0, help="of --kind sample and --shuffle (default: %(default)s)")
    add("--shuffle", action="store_true", help="images in a random order, for training with data.window")
    add("--rank", type=int, help="of --world processes that share the work (default: torchrun's, else 0 of 1)")
    add("--world", type=int, help="how many there are, on all machines; they need to share nothing but --out")
    from tread.data.shards import encode as run

    print(run(**vars(parser.parse_args(arguments))))


def plan(arguments: list[str]) -> None:
    """show what routes cost, what speed-up they allow and what memory a run needs"""
    parser = _parser("plan", plan)
    parser.usage = "tread plan MODEL [options]\n       tread plan ROUTES --depth N --width N --tokens N [--context N]"
    add = parser.add_argument
    add("subject", metavar="MODEL", help="a model such as flux, sd3/large or dit/XL/2; or routes, with --depth")
    add("--routes", help="a preset, a JSON string, or a JSON or YAML file (default: lora for adapters, else paper)")
    add("--resolution", help="a side in pixels, or WIDTHxHEIGHT (default: the model's usual one)")
    add("--frames", type=int, help="frames of a clip, for models of videos")
    add("--references", type=int, default=0, help="reference images of a sample, for edit models")
    add("--batch", type=int, help="samples per GPU and forward (default: 1; 256 for models from scratch)")
    add("--text", type=int, help="text tokens (default: those that the model's pipeline reads)")
    add("--lora", type=int, default=16, metavar="RANK", help="rank of the adapter (default: %(default)s)")
    add(
        "--targets", choices=("own", "attention"), default="own", help="linears that get it (default: the family's own)"
    )
    add("--full", action="store_true", help="train all weights instead of an adapter")
    add("--precision", help="of the base: bf16, int8, fp8, int4, nf4, ... (default: bf16; fp32 with --full)")
    add("--optimizer", default="adamw", help="as in a config, e.g. adamw-8bit, lion, prodigy (default: %(default)s)")
    add(
        "--checkpointing",
        nargs="?",
        const="full",
        default="none",
        choices=("none", "selective", "full"),
        help="of activations; alone it means full (default: %(default)s)",
    )
    add("--graphs", action="store_true", help="with CUDA graphs, which hold memory of their own")
    add("--offload", metavar="N|auto", help="layers in host memory; auto: as few as the smallest card needs")
    add("--ema", action=argparse.BooleanOptionalAction, help="a moving average (default: for models from scratch)")
    add("--gpus", type=int, metavar="N", help="also the memory and time of a step on each of N GPUs")
    add("--per-node", type=int, default=8, metavar="N", help="of them in one machine (default: %(default)s)")
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
    add("--context", type=int, default=0, help="with routes alone: text tokens that join attention (default: 0)")
    options = vars(parser.parse_args(arguments))
    shape = {name: options.pop(name) for name in ("depth", "width", "tokens", "context")}
    subject = options.pop("subject")
    given = [value is not None for value in (shape["depth"], shape["width"], shape["tokens"])]
    if any(given):
        if not all(given):
            parser.error("routes alone need --depth, --width and --tokens")
        from tread.report.plan import describe_plan

        print(describe_plan(subject, **shape))
        return
    from tread.report.plan import plan_model

    print(plan_model(subject, **options))


def report(arguments: list[str]) -> None:
    """show runs as one page: curves, pictures, tokens kept, settings"""
    parser = _parser("report", report)
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
    parser = _parser("families", families)
    parser.add_argument("word", nargs="?", default="", help="only classes with this in their name")
    from tread.report.families import describe_families

    print(describe_families(**vars(parser.parse_args(arguments))))


def doctor(arguments: list[str]) -> None:
    """check this machine, and one dense and one routed step of a config"""
    parser = _parser("doctor", doctor)
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
    config, given = options.config, options.settings
    if config is not None and "=" in config:  # `tread train` needs no file either
        config, given = None, [config, *given]
    from tread.report.doctor import doctor as run
    from tread.report.doctor import is_finetune

    if config is not None and is_finetune(config):
        no_loading_bars()
    if code := run(config, given, options.json):
        sys.exit(code)


def autotune(arguments: list[str]) -> None:
    """choose routes for a config by measurements on its model, data and device"""
    parser = _parser("autotune", autotune)
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
    if options["config"] is not None and "=" in options["config"]:  # `tread train` needs no file either
        options["config"], options["settings"] = None, [options["config"], *options["settings"]]
    from tread.autotune.goal import Goal
    from tread.autotune.rules import parse_ratios
    from tread.report.doctor import is_finetune

    goal = Goal(speedup=options.pop("target_speedup"), gap=options.pop("max_loss_gap"))
    del options["pareto"]
    if options["config"] is not None and is_finetune(options["config"]):
        no_loading_bars()
    from tread.autotune.run import Options
    from tread.autotune.run import autotune as run

    ratios, verify = parse_ratios(options.pop("ratios")), options.pop("verify")
    run(Options(goal=goal, ratios=ratios, verify_minutes=verify, **options))


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": train,
    "finetune": finetune,
    "init": init,
    "data": data,
    "export": export,
    "sample": sample,
    "eval": evaluate,
    "encode": encode,
    "plan": plan,
    "report": report,
    "families": families,
    "doctor": doctor,
    "autotune": autotune,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run `tread COMMAND ...`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: tread COMMAND ...\n\nToken routing that makes diffusion-transformer training faster.\n")
        for name, function in COMMANDS.items():
            print(f"  {name:<10}{function.__doc__}")
        print("\n`tread COMMAND --help` says more. In the environment, TREAD_DEBUG=1 shows tracebacks and")
        print("TREAD_WARNINGS=all the warnings of libraries.")
        return
    if arguments[0] in ("-V", "--version"):
        print(f"tread {__version__}")
        return
    command, *rest = arguments
    if command not in COMMANDS:
        _fail(f"tread: there is no command {command!r}; choose one of: {', '.join(COMMANDS)}")
    try:
        with quiet_libraries():
            COMMANDS[command](rest)
        sys.stdout.flush()
    except BrokenPipeError:  # `tread families | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except USER_ERRORS as error:
        if os.environ.get("TREAD_DEBUG"):
            raise
        _fail(f"tread {command}: {error}")
    except Stopped as error:  # it has said how to go on
        sys.exit(128 + error.number)
    except KeyboardInterrupt:
        _fail(f"tread {command}: interrupted", 130)


def _parser(name: str, function: Callable[[list[str]], None]) -> argparse.ArgumentParser:
    about = function.__doc__ or ""
    return argparse.ArgumentParser(prog=f"tread {name}", description=f"{about[:1].upper()}{about[1:]}.")


def _fail(message: str, code: int = 2) -> None:
    print(message, file=sys.stderr)
    sys.exit(code)
