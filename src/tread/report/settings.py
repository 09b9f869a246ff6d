"""The settings of `tread train` for people to read: `configs/`, the help text and docs/settings.md.

`python -m tread.report.settings` writes `configs/` and the page of the clone; a test holds them current.
"""

import textwrap
from pathlib import Path

from tread.config.fields import MISSING, Field, fields_of
from tread.config.reference import commented, scalar, section_lines, yaml_lines
from tread.pretrain.config import GROUPS, config_folder
from tread.pretrain.settings import MODELS, ROUTE_DOCS, ModelConfig, PretrainConfig
from tread.report.pages import markdown_table

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


def settings_page() -> str:
    """docs/settings.md: every setting of `tread train` in tables."""
    parts = [
        "# Settings of `tread train`\n",
        "Generated from the fields of `src/tread/pretrain/settings.py`; `tread train --help` prints the same. "
        "[finetune.md](finetune.md) has the keys of `tread finetune`.\n",
        textwrap.dedent(
            """\
            Settings come in layers, each over the one before: these defaults, `configs/config.yaml` in a clone, the
            chosen groups (`model=`, `data=`, `objective=`), a file of your own, `name=value` on the command line. The
            type of a setting decides how its value is read: text verbatim (`data.path=2024`, `null` is none where that
            is allowed), everything else as YAML (`optimizer.betas=[0.9, 0.99]`). A setting inside the routes has its
            index in the name: `model.tread_config.routes.0.selection_ratio=0.25`.
            """
        ),
    ]
    for name, field in fields_of(PretrainConfig).items():
        if name in GROUPS:
            usual, options = GROUPS[name]
            for option, owner in options.items():
                chosen = " (the default)" if option == usual else ""
                parts.append(f"## `{name}={option}`{chosen}\n\n{ABOUT[f'{name}.{option}']}\n")
                if name != "model" or option == usual:
                    parts.append(_table(f"{name}.", {k: f for k, f in fields_of(owner).items() if k != "name"}))
        elif callable(field.hint) and hasattr(field.hint, "__dataclass_fields__"):
            parts.append(f"## `{name}`\n\n{(field.hint.__doc__ or '').strip()}\n")
            parts.append(_table(f"{name}.", fields_of(field.hint)))
    top = {name: field for name, field in fields_of(PretrainConfig).items() if name in ("output_dir", "resume")}
    parts.insert(3, "## The run\n\n" + _table("", top))
    return "\n".join(parts).rstrip() + "\n"


def _table(prefix: str, fields: dict[str, Field]) -> str:
    rows = [
        (f"`{prefix}{name}`", "required" if field.default is MISSING else f"`{scalar(field.default)}`", field.doc)
        for name, field in fields.items()
    ]
    return (markdown_table(("setting", "default", "meaning"), rows) if rows else "It has no settings.") + "\n"


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
    """The routes of a model with a comment on each key."""
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


def write(root: Path) -> None:
    """Write the files below the root of a clone."""
    for path, text in config_files().items():
        target = root / "configs" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    (root / "docs" / "settings.md").write_text(settings_page(), encoding="utf-8")


if __name__ == "__main__":
    folder = config_folder()
    assert folder is not None, "only in a clone"
    write(folder.parent)
