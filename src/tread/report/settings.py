"""The settings of `tread train` for people to read: the files of `configs/`, and the help text."""

from tread.config.fields import fields_of
from tread.config.reference import commented, scalar, section_lines, yaml_lines
from tread.pretrain.config import GROUPS
from tread.pretrain.settings import MODELS, ROUTE_DOCS, ModelConfig, PretrainConfig

INTRODUCTION = """\
# Every setting of `tread train` (and of `accelerate launch train.py`), with its default. What you change here takes
# effect in this clone. For one run, change it on the command line:
#   tread train model=dit train.steps=500 optimizer.learning_rate=3e-4
# or keep your own in a file and name it first (see recipes/):
#   tread train my-run.yaml train.seed=1
"""
ABOUT = {
    "data.digits": "Scikit-learn's 1,797 handwritten digits, 8 x 8, ten classes: nothing to download.",
    "data.images": "A folder of images, one subfolder per class, trained on as pixels.",
    "data.latents": "WebDataset tars with `latent.npy` and `cls`, as `tread encode` writes them.",
    "objective.edm": "EDM (the paper's DiT runs).",
    "objective.flow": "Rectified flow (SiT).",
    "model.dit": "A diffusion transformer, all tokens in all layers.",
    "model.tread": "The same transformer with routing: half the tokens skip layers 2..-4, the paper's best placement.",
}


def config_files() -> dict[str, str]:
    """The files of `configs/`, by their path in it."""
    files = {"config.yaml": _config_yaml()}
    for group, (_, options) in GROUPS.items():
        files |= {f"{group}/{name}.yaml": _option_yaml(group, name) for name in options}
    return files


def train_help() -> str:
    """The text of `tread train --help`."""
    files = config_files()
    groups = [
        f"# {path.removesuffix('.yaml').replace('/', '=')}\n{text}" for path, text in files.items() if "/" in path
    ]
    usage = "usage: tread train [FILE.yaml] [name=value ...]\n\nSettings and their defaults:\n"
    return "\n".join([usage, files["config.yaml"].removeprefix(INTRODUCTION).lstrip(), *groups]).rstrip()


def _config_yaml() -> str:
    lines = [INTRODUCTION.rstrip(), ""]
    for group, (usual, options) in GROUPS.items():
        lines += commented(f"{group}: {usual}", f"{' | '.join(options)}: configs/{group}/ has their settings")
    fields = fields_of(PretrainConfig)
    lines += ["", *yaml_lines({name: fields[name] for name in ("output_dir", "resume")})]
    for name, field in fields.items():
        if name not in GROUPS and name not in ("output_dir", "resume"):
            lines += ["", *section_lines(name, field.hint)]
    return "\n".join(lines) + "\n"


def _option_yaml(group: str, name: str) -> str:
    owner = GROUPS[group][1][name]
    fields = {key: field for key, field in fields_of(owner).items() if key not in ("name", "tread_config")}
    lines = [f"# {ABOUT[f'{group}.{name}']}", *yaml_lines(fields)]
    if owner is ModelConfig:
        lines += _route_lines(MODELS[name]["tread_config"], fields_of(owner)["tread_config"].doc)
    return "\n".join(lines) + "\n"


def _route_lines(routes: dict[str, object] | None, about: str) -> list[str]:
    if routes is None:
        return commented("tread_config: null", about)
    lines = commented("tread_config:", about)
    for name, value in routes.items():
        if isinstance(value, list):
            lines.append("  routes:")
            for route in value:
                entries = [
                    commented(f"      {key}: {scalar(inner)}", ROUTE_DOCS[key])[0] for key, inner in route.items()
                ]
                lines += [entries[0].replace("      ", "    - ", 1), *entries[1:]]
        else:
            lines += commented(f"  {name}: {scalar(value)}", ROUTE_DOCS[name])
    return lines
