"""Composition: every group and recipe, files, what a resumed run keeps, and the text of every refusal."""

import json
import re
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.programs import ROOT
from tread.config.layers import changes
from tread.config.schema import plain
from tread.errors import ConfigError, TreadWarning
from tread.pretrain.build import build_model
from tread.pretrain.config import GROUPS, compose, config_folder, from_run
from tread.report.settings import config_files
from tread.routing.plan import RoutePlan
from tread.training.job import CONFIG_FILE

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
CHOICES = [[f"{group}={name}" for name in options] for group, (_, options) in GROUPS.items()]
ODD_TEXTS = ["été", "photos(1)", "a=b", "a#b", "it's", "~x", "2024", "1_000", "runs/ü", "null.d", "[x", "a: b", "1e-4"]


def refused(*given: str) -> str:
    with pytest.raises(ConfigError) as error:
        compose(given)
    return str(error.value)


def ratio_of(tread_config: Any) -> float:
    return RoutePlan.from_config(tread_config).routes[0].selection_ratio


@pytest.mark.parametrize("groups", [*product(*CHOICES)], ids=" ".join)
def test_every_combination_of_groups_composes(groups: tuple[str, ...]) -> None:
    path = [] if "data=digits" in groups else ["data.path=somewhere"]
    config = compose([*groups, *path])
    named = [f"model={config.model.name}", f"data={config.data['name']}", f"objective={config.objective['name']}"]
    assert named == [*groups]
    assert (config.model.tread_config is None) == ("model=dit" in groups)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_composes_into_a_model_it_can_route(recipe: Path) -> None:
    config = compose([str(recipe), "data.path=somewhere", "model.width=16", "model.heads=2"])
    model = build_model(config.model, (4, 32, 32), 1000, checkpointing=False)
    (route,) = RoutePlan.from_config(config.model.tread_config or {}).resolve(model.depth).routes
    # the paper's placement, start = 2, end = B - 4, ratio 0.5
    assert (route.selection_ratio, route.start_layer_idx, route.end_layer_idx) == (0.5, 2, model.depth - 4)
    assert config.objective["name"] == ("edm" if recipe.stem.startswith("dit") else "flow")
    rate = 6e-4 if recipe.stem.startswith("cifar10") else 1e-4  # a short run's, and the paper's
    assert (config.train.batch_size, config.optimizer.learning_rate, config.ema.decay) == (256, rate, 0.9999)
    assert config.optimizer.betas == (0.9, 0.999)
    assert config.train.class_dropout == 0.1


def test_recipes_are_there() -> None:
    expected = {f"{kind}-{size}-2" for kind in ("dit", "sit") for size in ["s", "b", "l", "xl"]}
    assert {path.stem for path in RECIPES} >= expected


def test_the_defaults_are_the_tiny_model_on_digits_half_the_tokens_routed() -> None:
    config = compose([])
    assert (config.model.size, config.data, config.output_dir) == ("tiny", {"name": "digits"}, "runs/tread-digits")
    (route,) = RoutePlan.from_config(config.model.tread_config or {}).routes
    assert route.to_config() == {"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -4}


def test_generated_files_are_current(tmp_path: Path) -> None:
    """`make docs` writes them; a wheel, which has none of them, composes the same config."""
    folder = config_folder()
    assert folder is not None
    written = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.yaml")}
    assert written == config_files()
    (tmp_path / CONFIG_FILE).write_text("")
    for groups in product(*CHOICES):
        assert compose([*groups, *["data.path=x"] * ("data=digits" not in groups)], tmp_path) == compose(
            [*groups, *["data.path=x"] * ("data=digits" not in groups)]
        )


def test_edits_of_the_files_take_effect_and_are_overruled_in_order(tmp_path: Path) -> None:
    """Defaults of the fields, configs/config.yaml, groups, a recipe, name=value."""
    folder = config_folder()
    assert folder is not None
    shutil.copytree(folder, tmp_path / "configs")
    base, group = tmp_path / "configs" / CONFIG_FILE, tmp_path / "configs" / "model" / "tread.yaml"
    base.write_text(base.read_text().replace("steps: 2000", "steps: 7").replace("data: digits", "data: latents"))
    group.write_text(group.read_text().replace("size: tiny", "size: S/2").replace("ratio: 0.5", "ratio: 0.25"))
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("data: {path: shards}\nmodel: {depth: 3}\ntrain: {batch_size: 5, seed: 1}\n")
    config = compose([str(recipe), "train.seed=2"], tmp_path / "configs")
    assert (config.train.steps, config.train.batch_size, config.train.seed) == (7, 5, 2)
    assert (config.model.size, config.model.depth, config.data["name"]) == ("S/2", 3, "latents")
    assert ratio_of(config.model.tread_config) == 0.25
    assert compose([str(recipe), "model=dit"], tmp_path / "configs").model.size == "tiny"


@pytest.mark.parametrize(
    ("name", "text"),
    [("m.yaml", "train: {steps: 7}"), ("m.json", '{"train": {"steps": 7}}'), ("m.toml", "train.steps = 7")],
)
def test_a_file_may_be_yaml_json_or_toml(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert compose([str(tmp_path / name)]).train.steps == 7


def test_files_of_earlier_versions(tmp_path: Path) -> None:
    """Hydra's `defaults:` lists, the old name of model.size, the old default of output_dir."""
    new = compose(["model=dit", "objective=edm", "model.size=S/2", "train.steps=7", "objective.p_mean=-0.4"])
    file = tmp_path / "mine.yaml"
    for overrides in (
        "{override model: dit}, {override objective: edm}",
        "override model: dit, override objective: edm",
    ):
        file.write_text(
            f"defaults: [config, {overrides}, _self_]\noutput_dir: runs/${{model.name}}-${{data.name}}\n"
            "model: {preset: S/2}\ntrain: {steps: 7}\nobjective: {p_mean: -0.4}\n"
        )
        assert compose([str(file)]) == new
    (tmp_path / "configs" / "model").mkdir(parents=True)
    (tmp_path / "configs" / "config.yaml").write_text(
        "defaults:\n  - model: dit\n  - objective: edm\n  - _self_\ntrain: {steps: 7}\n"
    )
    (tmp_path / "configs" / "model" / "dit.yaml").write_text("name: dit\npreset: S/2\n")
    assert compose(["objective.p_mean=-0.4"], tmp_path / "configs") == new
    (tmp_path / "configs" / "model" / "tread.yaml").write_text("defaults: [dit, _self_]\nname: tread\n")
    assert compose(["model=tread"], tmp_path / "configs").model.size == "S/2"
    assert compose(["model=dit", "model.preset=S/2"]).model.size == "S/2"


def test_files_that_do_not_serve(tmp_path: Path) -> None:
    def written(text: str) -> str:
        (tmp_path / "mine.yaml").write_text(text)
        return str(tmp_path / "mine.yaml")

    assert refused("no.yaml").startswith("the config file 'no.yaml' does not exist (paths are relative to")
    assert refused(written("train: [\n")).startswith(
        f"the config file '{tmp_path}/mine.yaml' is not valid YAML at line"
    )
    assert refused(written("- 1\n")).startswith(f"{tmp_path}/mine.yaml is no mapping of settings")
    assert refused(written("trian: {steps: 7}\n")).startswith(
        f"{tmp_path}/mine.yaml: there is no setting trian. Did you mean 'train'?"
    )
    assert refused(written("train: {stepz: 7}\n")).startswith(
        f"{tmp_path}/mine.yaml: there is no setting train.stepz. Did you mean 'train.steps'?"
    )
    assert refused(written("train: 7\n")) == "train is 7; it must be a mapping of settings."
    assert "'steps' is given twice in one mapping" in refused(written("train:\n  steps: 7\n  steps: 8\n"))
    assert "'start_layer_idx' is given twice" in refused(
        written("model: {tread_config: {routes: [{start_layer_idx: 1, start_layer_idx: 2}]}}\n")
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("trian.steps=5", "there is no setting trian.steps. Did you mean 'train.steps'? `tread train --help` lists"),
        ("train.stepz=5", "there is no setting train.stepz. Did you mean 'train.steps'? `tread train --help` lists"),
        ("~train.steps=5", "there is no setting ~train.steps. Did you mean 'train.steps'?"),
        ("model.tread_config.routes.0.selection_ration=0.5", "routes[0]: unknown key 'selection_ration'. Did you mean"),
        ("model=foo", "there is no model=foo; choose one of: tread, dit."),
        ("data=3", "there is no data=3; choose one of: digits, images, latents."),
        ("data.name=null", "there is no data=null; choose one of: digits, images, latents."),
        ("data=images", "data.path is missing; give it as data.path=VALUE."),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate is 'fast'; it must be a number."),
        ("train.steps=1,2", "train.steps is '1,2'; it must be a whole number."),
        ("train.steps=[1,", "the value of train.steps, '[1,', is not valid YAML at line 1, column 4"),
        ("train=5", "train is 5; it is a section: set train.SETTING=VALUE."),
        (
            "model.tread_config.routes.3.selection_ratio=0.7",
            "model.tread_config.routes.3 cannot be set: model.tread_config.routes has 1 item, counted from 0; to",
        ),
        (
            "model.tread_config.routes.selection_ratio=0.7",
            "model.tread_config.routes.selection_ratio cannot be set: model.tread_config.routes has 1 item",
        ),
        ("train.steps", "cannot read 'train.steps': write name=value, e.g."),
        ("resume=nowhere", "'nowhere' is not the folder of a run: it has no config.yaml."),
    ],
)
def test_refusals(setting: str, message: str) -> None:
    assert refused(setting).startswith(message)


def test_a_setting_of_another_option_names_its_owners(tmp_path: Path) -> None:
    assert refused("data.path=/photos") == (
        "data.path is a setting of data=images and of data=latents, but this run has data=digits: add data=images or "
        "data=latents, or leave data.path out."
    )
    assert refused("objective.p_mean=-1").startswith("objective.p_mean is a setting of objective=edm, but this run has")
    (tmp_path / "mine.yaml").write_text("data: {size: 32}\n")
    assert refused(str(tmp_path / "mine.yaml")).startswith(f"{tmp_path}/mine.yaml: data.size is a setting of data=ima")
    assert compose([str(tmp_path / "mine.yaml"), "data=images", "data.path=x"]).data["size"] == 32


def test_a_whole_number_may_have_an_exponent(tmp_path: Path) -> None:
    assert compose(["train.steps=4e5", "optimizer.warmup_steps=1E2"]).train.steps == 400_000
    (tmp_path / "mine.yaml").write_text("train: {steps: 1.5e3}\n")
    assert type(compose([str(tmp_path / "mine.yaml")]).train.steps) is int
    for text in ("1.5e0", "2.0", "1e400", "nan"):
        assert "it must be a whole number" in refused(f"train.steps={text}")


def test_a_part_of_what_was_replaced() -> None:
    assert refused("model.tread_config=balanced", "model.tread_config.routes.0.selection_ratio=0.7") == (
        "model.tread_config.routes.0.selection_ratio cannot be set: model.tread_config is 'balanced', which has no "
        "parts."
    )


def test_an_unknown_setting_is_searched_in_the_groups_that_were_chosen() -> None:
    assert "Did you mean 'data.num_classes'?" in refused("data=latents", "data.path=x", "data.num_clases=3")
    assert "Did you mean 'objective.sigma_max'?" in refused("objective=edm", "objective.sigma_maxx=3")


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_text_is_taken_verbatim(text: str, tmp_path: Path) -> None:
    config = compose(["data=images", f"data.path={text}", f"output_dir={text}"])
    assert (config.data["path"], config.output_dir) == (text, text)
    quoted = tmp_path / "mine.yaml"
    quoted.write_text(f"data: {{name: images, path: {json.dumps(text)}}}\n")
    assert compose([str(quoted)]).data["path"] == text
    kept = tmp_path / CONFIG_FILE  # as a run keeps it
    kept.write_text(yaml.safe_dump(plain(config), allow_unicode=True))
    assert from_run(tmp_path) == config


def test_unquoted_text_of_a_file_is_taken_verbatim(tmp_path: Path) -> None:
    for text in ("2024", "1_000", "no", "2024-01-02", "1e-4"):
        (tmp_path / "mine.yaml").write_text(f"data: {{name: images, path: {text}}}\n")
        assert compose([str(tmp_path / "mine.yaml")]).data["path"] == text


def test_tread_config_takes_every_form_and_replaces_the_one_before(tmp_path: Path) -> None:
    written = {"routes": [{"selection_ratio": 0.25, "start_layer_idx": 1, "end_layer_idx": -2}], "selector": "l1"}
    (tmp_path / "plan.json").write_text(json.dumps(written))
    compact = "{routes:[{selection_ratio:0.25,start_layer_idx:1,end_layer_idx:-2}],selector:l1}"
    for form in (json.dumps(written), json.dumps({"tread_config": written}), compact, str(tmp_path / "plan.json")):
        config = compose([f"model.tread_config={form}"]).model.tread_config
        assert config is not None
        assert RoutePlan.from_config(config) == RoutePlan.from_config(written)
    assert compose(["model.tread_config=paper"]).model.tread_config == "paper"
    assert compose(["model.tread_config=null"]).model.tread_config is None
    for name in ("routes.0.selection_ratio", "routes[0].selection_ratio"):
        assert ratio_of(compose([f"model.tread_config.{name}=0.7"]).model.tread_config) == 0.7
    plan = compose(["model.tread_config.schedule={cooldown_fraction: 0.2}"]).model.tread_config
    assert RoutePlan.from_config(plan or {}).schedule is not None
    (tmp_path / "mine.yaml").write_text("model: {tread_config: {preset: high-res}}\n")
    assert ratio_of(compose([str(tmp_path / "mine.yaml")]).model.tread_config) == 0.6
    (tmp_path / "mine.yaml").write_text("model: {tread_config: {selector: l1}}\n")
    assert RoutePlan.from_config(compose([str(tmp_path / "mine.yaml")]).model.tread_config or {}).selector == "l1"


def test_a_resumed_run_keeps_its_settings_and_takes_what_is_named(trained: Path) -> None:
    saved = plain(from_run(trained))
    assert plain(compose([f"resume={trained}"])) == saved | {"resume": str(trained)}
    changed = compose([f"resume={trained}", "train.steps=20", "optimizer.clip=null"])
    assert changes(saved, plain(changed)) == [
        "optimizer.clip: 1.0 -> None",
        f"resume: None -> {trained}",
        "train.steps: 6 -> 20",
    ]
    latest = compose(["resume=latest", f"output_dir={trained}", "train.steps=20"])
    assert latest.model == changed.model
    assert latest.output_dir == str(trained)


def test_steps_and_epochs_replace_each_other_and_are_not_given_together(trained: Path, tmp_path: Path) -> None:
    """A recipe's steps, the default's and a resumed run's give way to epochs of a later layer, and the other way."""

    def length(*given: str) -> int | tuple[str, int]:
        train = compose(given).train
        return train.steps if train.epochs is None else ("epochs", train.epochs)

    recipe, file = str(ROOT / "recipes" / "dit-b-2.yaml"), tmp_path / "mine.yaml"
    assert length() == 2000
    assert length("train.epochs=3") == length(recipe, "data.path=p", "train.epochs=3") == ("epochs", 3)
    assert length(f"resume={trained}") == 6
    assert length(f"resume={trained}", "train.epochs=3") == ("epochs", 3)
    file.write_text("train: {epochs: 5}\n")
    assert length(str(file)) == ("epochs", 5)
    assert length(str(file), "train.steps=7") == 7
    assert length(str(file), "train={steps: 7}") == 7
    assert length(str(file), "train.epochs=null") == 2000
    both = "train.steps is 7 and train.epochs is 3; one of them says how long to train: leave the other out."
    assert refused("train.steps=7", "train.epochs=3") == both
    assert refused("train={steps: 7, epochs: 3}") == both
    assert refused(f"resume={trained}", "train.epochs=3", "train.steps=7") == both
    file.write_text("train: {epochs: 3, steps: 7}\n")
    assert refused(str(file)) == f"{file}: {both}"


@pytest.mark.parametrize("given", [[], ["model=dit", "objective=edm"]])
def test_the_latest_of_the_folder_that_a_run_gets_by_itself(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run in runs/MODEL-DATA resumes with its settings like one in a folder that was named."""
    monkeypatch.chdir(tmp_path)
    config = compose([*given, "model.depth=6", "optimizer.learning_rate=0.5"])
    Path(config.output_dir).mkdir(parents=True)
    (Path(config.output_dir) / CONFIG_FILE).write_text(yaml.safe_dump(plain(config)))
    assert plain(compose([*given, "resume=latest"])) == plain(config) | {"resume": "latest"}
    other = compose(["data=images", "data.path=pictures", "resume=latest"])
    assert (other.output_dir, other.model.depth) == ("runs/tread-images", None), "nothing to resume there"


def test_a_resumed_run_takes_settings_of_groups_that_are_not_the_default(tmp_path: Path) -> None:
    config = compose(["data=latents", "data.path=old", "objective=edm", f"output_dir={tmp_path}"])
    (tmp_path / CONFIG_FILE).write_text(yaml.safe_dump(plain(config)))
    resumed = compose([f"resume={tmp_path}", "data.path=new", "objective.p_mean=-1"])
    assert resumed.data == config.data | {"path": "new"}
    assert resumed.objective == config.objective | {"p_mean": -1}
    other = compose([f"resume={tmp_path}", "data=images", "data.path=pictures", "data.size=32"])
    assert other.data == {"name": "images", "path": "pictures", "size": 32, "flip": True}
    assert refused(f"resume={tmp_path}", "data=images") == "data.path is missing; give it as data.path=VALUE."
    assert refused(f"resume={tmp_path}", "data.paht=new").startswith(
        "there is no setting data.paht. Did you mean 'data.path'?"
    )


def test_a_run_goes_on_in_its_own_folder_unless_told_otherwise(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "moved").symlink_to(trained)
    assert compose([f"resume={tmp_path / 'moved'}"]).output_dir == str(tmp_path / "moved")
    assert compose([f"resume={trained}", f"output_dir={tmp_path}/fork"]).output_dir == f"{tmp_path}/fork"


def test_the_config_of_a_moved_run_goes_on_where_it_lies(trained: Path, tmp_path: Path) -> None:
    """Its output_dir is the old folder, which is gone; a new run would begin there."""
    folder = shutil.copytree(trained, tmp_path / "run")
    saved = plain(from_run(folder)) | {"output_dir": str(tmp_path / "before")}
    (folder / CONFIG_FILE).write_text(yaml.safe_dump(saved))
    given = [str(folder / CONFIG_FILE), "resume=latest"]
    sentence = f"output_dir '{tmp_path}/before' has no checkpoints, so the run goes on beside the config, in {folder};"
    with pytest.warns(TreadWarning, match=re.escape(sentence)):
        assert compose([*given, "train.steps=9"]).resumed == folder
    assert compose([*given, f"output_dir={tmp_path}/new"]).output_dir == f"{tmp_path}/new"
    shutil.copytree(trained, tmp_path / "before")
    assert compose(given).output_dir == f"{tmp_path}/before", "a copy leaves the run where it was"


def test_nothing_to_resume_yet_is_a_new_run(tmp_path: Path) -> None:
    config = compose(["resume=latest", f"output_dir={tmp_path}/new", "train.steps=5"])
    assert (config.resume, config.train.steps) == ("latest", 5)


def test_a_saved_config_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text("train: [\n")
    assert refused(f"resume={tmp_path}").startswith(f"the config file '{tmp_path}/config.yaml' is not valid YAML")
    (tmp_path / CONFIG_FILE).write_text("")
    assert refused(f"resume={tmp_path}") == f"{tmp_path}/config.yaml is not the config of a run; restore it."
