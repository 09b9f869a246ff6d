"""docs/settings.md, made from the fields of the config's dataclasses."""

import textwrap

from pages.tables import markdown_table
from tread.config.fields import MISSING, Field, fields_of
from tread.config.reference import scalar
from tread.pretrain.config import GROUPS
from tread.pretrain.settings import PretrainConfig
from tread.report.settings import ABOUT


def settings_page() -> str:
    """docs/settings.md: every setting of `tread train` in tables."""
    parts = [
        "# Settings of `tread train`\n",
        "Generated from the fields of `src/tread/pretrain/settings.py`; `tread train --help` prints the same. "
        "[finetune-keys.md](finetune-keys.md) has the keys of `tread finetune`.\n",
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
