"""Composition: every group and recipe, a file of one's own, what a resumed run keeps, and every refusal's text."""

import json
from itertools import product
from pathlib import Path

import pytest

from tests.programs import ROOT
from tread.errors import ConfigError
from tread.pretrain.config import CONFIG_FILE, changes, compose, config_folder, flatten, from_run
from tread.pretrain.task import build_model
from tread.routing.plan import RoutePlan

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
GROUPS = [
    [f"{group}={path.stem}" for path in sorted((config_folder() / group).glob("*.yaml"))]
    for group in ("model", "data", "objective")
]


def refused(*arguments: str) -> str:
    with pytest.raises(ConfigError) as error:
        compose(arguments)
    return str(error.value)


@pytest.mark.parametrize("groups", [*product(*GROUPS)], ids=" ".join)
def test_every_combination_of_groups_composes(groups: tuple[str, ...]) -> None:
    path = [] if "data=digits" in groups else ["data.path=somewhere"]
    config = compose([*groups, *path]).config
    assert [f"model={config.model.name}", f"data={config.data['name']}", f"objective={config.objective['name']}"] == [
        *groups
    ]
    assert (config.model.tread_config is None) == ("model=dit" in groups)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_composes_into_a_model_it_can_route(recipe: Path) -> None:
    config = compose([str(recipe), "data.path=somewhere", "model.width=16", "model.heads=2"]).config
    model = build_model(config.model, (4, 32, 32), 1000, checkpointing=False)
    assert config.model.tread_config is not None
    (route,) = RoutePlan.from_config(config.model.tread_config).resolve(model.depth).routes
    # the paper's placement, start = 2, end = B - 4, ratio 0.5
    assert (route.selection_ratio, route.start_layer_idx, route.end_layer_idx) == (0.5, 2, model.depth - 4)
    assert config.objective["name"] == ("edm" if recipe.stem.startswith("dit") else "flow")
    rate = 6e-4 if recipe.stem.startswith("cifar10") else 1e-4  # a short run's, and the paper's
    assert (config.train.batch_size, config.optimizer.learning_rate, config.ema.decay) == (256, rate, 0.9999)
    assert config.optimizer.betas == (0.9, 0.999)
    assert config.train.class_dropout == 0.1


def test_recipes_are_there() -> None:
    assert {path.stem for path in RECIPES} >= {
        f"{kind}-{size}-2" for kind in ("dit", "sit") for size in ["s", "b", "l", "xl"]
    }


def test_the_defaults_are_the_tiny_model_on_digits_half_the_tokens_routed() -> None:
    config = compose([]).config
    assert (config.model.preset, config.data, config.output_dir) == ("tiny", {"name": "digits"}, "runs/tread-digits")
    assert config.model.tread_config is not None
    (route,) = RoutePlan.from_config(config.model.tread_config).routes
    assert route.to_config() == {"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -4}


def test_a_file_of_the_users_own_with_the_command_line_on_top(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "defaults: [config, override model: dit, override objective: edm, _self_]\n"
        "train: {steps: 7, seed: 3}\nobjective: {p_mean: -0.4}\n"
    )
    config = compose([str(file), "train.seed=5"]).config
    assert (config.train.steps, config.train.seed, config.train.batch_size) == (
        7,
        5,
        compose([]).config.train.batch_size,
    )
    assert (config.model.name, config.objective["name"], config.objective["p_mean"]) == ("dit", "edm", -0.4)


def test_files_that_do_not_serve(tmp_path: Path) -> None:
    def written(text: str, name: str = "mine.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    assert refused("no.yaml") == "the config file 'no.yaml' does not exist."
    assert refused(written("train: {steps: 7}\n")) == (
        f"{tmp_path}/mine.yaml lacks checkpoint: begin it with `defaults: [config, _self_]`, as recipes/ do."
    )
    assert refused(written("train: [\n")).startswith(f"{tmp_path}/mine.yaml is not valid YAML: while parsing")
    assert refused(written("defaults: [config, _self_]\ntrian: {steps: 7}\n")).startswith(
        "config: unknown key 'trian'. Did you mean 'train'?"
    )
    assert refused(written("defaults: [config, _self_]\ntrain: {stepz: 7}\n")).startswith(
        "train: unknown key 'stepz'. Did you mean 'steps'?"
    )
    assert refused(written("defaults: [config, _self_]\n", "config.yaml")) == (
        f"the config.yaml beside {tmp_path}/config.yaml hides tread's own of that name; rename it."
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("trian.steps=5", "there is no setting trian. Did you mean 'train'? `tread train --help` lists them all."),
        (
            "train.stepz=5",
            "there is no setting train.stepz. Did you mean 'train.steps'? `tread train --help` lists them all.",
        ),
        (
            "model.tread_config.routes.0.selection_ration=0.5",
            "there is no setting model.tread_config.routes.0.selection_ration. Did you mean "
            "'model.tread_config.routes.0.selection_ratio'? `tread train --help` lists them all.",
        ),
        ("model=foo", "there is no model=foo; choose one of: dit, tread."),
        ("data=images", "data.path is missing; give it as data.path=VALUE."),
        ("data=3", "cannot read 'data=3': choose the group by its name, e.g. model=dit."),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate is 'fast'; it must be a number."),
        ("train.steps=1,2", "cannot read 'train.steps=1,2': quote a value that holds spaces, commas or brackets."),
        ("train.steps=[1,", "cannot read 'train.steps=[1,': quote a value that holds spaces, commas or brackets."),
        (
            "model.tread_config.routes[0].selection_ratio=0.7",
            "cannot read 'model.tread_config.routes[0].selection_ratio=0.7': write the place in a list as a number, "
            "e.g. model.tread_config.routes.0.selection_ratio=0.5.",
        ),
        (
            "model.tread_config.routes.selection_ratio=0.7",
            "cannot read 'model.tread_config.routes.selection_ratio=0.7': write the place in a list as a number, "
            "e.g. model.tread_config.routes.0.selection_ratio=0.5.",
        ),
        (
            "model.tread_config.routes.3.selection_ratio=0.7",
            "there is no model.tread_config.routes[3]: places in a list count from 0; to make it longer, give the "
            "whole list.",
        ),
        (
            "train.steps",
            "cannot read 'train.steps': write setting=value, e.g. train.steps=500, after at most one FILE.yaml.",
        ),
        (
            "mine.yml",
            "cannot read 'mine.yml': write setting=value, e.g. train.steps=500, after at most one FILE.yaml.",
        ),
        (
            "~train.steps=5",
            "cannot read '~train.steps=5': write setting=value, e.g. train.steps=500, after at most one FILE.yaml.",
        ),
        ("resume=true", "resume is True; it must be text or null."),
        ("resume=nowhere", "'nowhere' is not the folder of a run: it has no config.yaml."),
    ],
)
def test_refusals(setting: str, message: str) -> None:
    assert refused(setting) == message


def test_a_part_of_what_was_replaced() -> None:
    assert refused("model=tread", "model.tread_config=balanced", "model.tread_config.routes.0.selection_ratio=0.7") == (
        "model.tread_config.routes cannot be set here: another setting has replaced what it is a part of."
    )


def test_an_unknown_setting_is_searched_in_the_groups_that_were_chosen() -> None:
    assert "Did you mean 'data.num_classes'?" in refused("data=latents", "data.path=x", "data.num_clases=3")
    assert "Did you mean 'objective.sigma_max'?" in refused("objective=edm", "objective.sigma_maxx=3")


def test_tread_config_takes_every_form_and_replaces_the_one_before(tmp_path: Path) -> None:
    written = {"routes": [{"selection_ratio": 0.25, "start_layer_idx": 1, "end_layer_idx": -2}], "selector": "l1"}
    (tmp_path / "plan.json").write_text(json.dumps(written))
    hydra = "{routes:[{selection_ratio:0.25,start_layer_idx:1,end_layer_idx:-2}],selector:l1}"
    for form in (json.dumps(written), json.dumps({"tread_config": written}), hydra, str(tmp_path / "plan.json")):
        config = compose([f"model.tread_config={form}"]).config.model.tread_config
        assert config is not None
        assert RoutePlan.from_config(config) == RoutePlan.from_config(written)
    assert compose(["model.tread_config=paper"]).config.model.tread_config == "paper"
    assert compose(["model.tread_config=null"]).config.model.tread_config is None


def test_a_resumed_run_keeps_its_settings_and_takes_what_is_named(trained: Path) -> None:
    saved = from_run(trained).raw
    assert compose([f"resume={trained}"]).raw == saved | {"resume": str(trained)}
    changed = compose([f"resume={trained}", "train.steps=20", "optimizer.clip=null"])
    assert changes(saved, changed.raw) == [
        "optimizer.clip: 1.0 -> None",
        f"resume: None -> {trained}",
        "train.steps: 6 -> 20",
    ]
    latest = compose(["resume=latest", f"output_dir={trained}", "train.steps=20"])
    assert latest.config.model == changed.config.model
    assert latest.config.output_dir == str(trained)


def test_a_resumed_run_takes_settings_of_groups_that_are_not_the_default(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    raw = compose(["data=latents", "data.path=old", "objective=edm", f"output_dir={tmp_path}"]).raw
    OmegaConf.save(OmegaConf.create(raw), tmp_path / CONFIG_FILE)
    resumed = compose([f"resume={tmp_path}", "data.path=new", "objective.p_mean=-1"]).config
    assert resumed.data == raw["data"] | {"path": "new"}
    assert resumed.objective == raw["objective"] | {"p_mean": -1}
    other = compose([f"resume={tmp_path}", "data=images", "data.path=pictures", "data.size=32"]).config
    assert other.data == {"name": "images", "path": "pictures", "size": 32, "flip": True}
    assert refused(f"resume={tmp_path}", "data=images") == "data.path is missing; give it as data.path=VALUE."
    assert refused(f"resume={tmp_path}", "data.paht=new").startswith(
        "there is no setting data.paht. Did you mean 'data.path'?"
    )


def test_a_run_goes_on_in_its_own_folder_unless_told_otherwise(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "moved").symlink_to(trained)
    assert compose([f"resume={tmp_path / 'moved'}"]).config.output_dir == str(tmp_path / "moved")
    assert compose([f"resume={trained}", f"output_dir={tmp_path}/fork"]).config.output_dir == f"{tmp_path}/fork"


def test_nothing_to_resume_yet_is_a_new_run(tmp_path: Path) -> None:
    config = compose(["resume=latest", f"output_dir={tmp_path}/new", "train.steps=5"]).config
    assert (config.resume, config.train.steps) == ("latest", 5)


def test_a_saved_config_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text("train: [\n")
    assert refused(f"resume={tmp_path}").startswith(f"{tmp_path}/config.yaml cannot be read (while parsing")
    (tmp_path / CONFIG_FILE).write_text("")
    assert refused(f"resume={tmp_path}") == "output_dir is missing; it must be text."


def test_changes() -> None:
    old = {"a": {"b": 1, "gone": 2}, "same": [1, 2], "routes": [{"r": 1, "s": 2}]}
    new = {"a": {"b": 3, "added": {"c": None}}, "same": [1, 2], "new": "x", "routes": [{"r": 1, "s": 3}]}
    assert changes(old, new) == ["a.b: 1 -> 3", "a.gone: 2 -> None", "new: None -> x", "routes.0.s: 2 -> 3"]
    assert flatten(new) == {
        "a.b": 3,
        "a.added.c": None,
        "same": [1, 2],
        "new": "x",
        "routes.0.r": 1,
        "routes.0.s": 3,
    }
