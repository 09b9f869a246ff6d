"""The commands of fine-tuning: `finetune`, `init`, `data`, `export`."""

import shlex
import sys
from pathlib import Path

from tread.commands import make_parser
from tread.terminal import no_loading_bars


def finetune(arguments: list[str]) -> None:
    """tune a released model, dense or routed"""
    parser = make_parser("finetune", finetune)
    parser.usage = "tread finetune [--check [--json]] FILE [key=value ...]"
    help_text = "a JSON, YAML, TOML or .env config; `tread init` writes one"
    parser.add_argument("config", metavar="FILE", type=Path, help=help_text)
    parser.add_argument("settings", nargs="*", default=[], metavar="key=value", help="settings that replace the file's")
    parser.add_argument("--check", action="store_true", help="judge every key, the model and the data; train nothing")
    parser.add_argument("--json", action="store_true", help="with --check: as JSON, for scripts")
    parser.epilog = "docs/finetune.md is the guide, docs/finetune-keys.md lists every key with its default."
    options = parser.parse_intermixed_args(arguments)
    from tread.finetune import config

    if options.check:
        sys.exit(config.check(options.config, options.json, options.settings, no_loading_bars))
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

    parser = make_parser("init", init)
    parser.add_argument("family", metavar="FAMILY", help=f"one of {', '.join(TUNE_FAMILIES)}")
    parser.add_argument("--model", required=True, help="the base model in diffusers format: a folder or a hub id")
    parser.add_argument("--data", required=True, help="a folder of images or videos with captions")
    parser.add_argument(
        "--scratch", action="store_true", help="train a new transformer instead of a LoRA of the model's"
    )
    print(starter_config(**vars(parser.parse_args(arguments))), end="")


def data(arguments: list[str]) -> None:
    """show the data of a fine-tune by bucket: captions, masks, what is left out"""
    parser = make_parser("data", data)
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

    surveyed = survey(read_config(options.config, options.settings))
    print(described(surveyed))
    if options.html is not None:
        from tread.finetune.data.page import write_page

        command = shlex.join(["tread", "data", *arguments])
        heading = f"The data of {options.config.name}"
        print(write_page(options.html, surveyed, heading=heading, command=command, most=options.most))


def export(arguments: list[str]) -> None:
    """make the result of a fine-tune again, from any of its checkpoints"""
    parser = make_parser("export", export)
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
