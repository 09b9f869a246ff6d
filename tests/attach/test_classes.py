"""No transformer class of diffusers is forgotten, and none changes unseen.

`python tests/attach/test_classes.py` writes `signatures.json` anew. Do so for a new release of diffusers only after
reading what changed in the classes that this test names.
"""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from diffusers.models import transformers
from torch import nn

from tests.tiny.stock import CASES
from tread.attach.families import FAMILIES, REFUSED
from tread.cli import main
from tread.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")
SIGNATURES = Path(__file__).with_name("signatures.json")
ROUTED = {name: family for family in FAMILIES for name in family.models}
EXPORTED = {
    name
    for name, value in vars(transformers).items()
    if inspect.isclass(value) and issubclass(value, nn.Module) and not name.startswith("_")
}


def signatures() -> dict[str, Any]:
    """What the families rely on: the arguments of each class and of its layers, from the cases' models."""
    found: dict[str, Any] = {}
    for case in CASES:
        model = case.build()
        name = type(model).__name__
        entry = found.setdefault(name, {"forward": arguments(model)})
        for stack in ROUTED[name].stacks:
            layers = entry.setdefault(stack.name, {})
            for layer in stack.layers(model):
                layers[type(layer).__name__] = arguments(layer)
    return dict(sorted(found.items()))


def arguments(module: nn.Module) -> str:
    return " ".join(list(inspect.signature(type(module).forward).parameters)[1:])


def test_every_class_is_routed_or_refused_and_not_both():
    assert set(ROUTED) | set(REFUSED) == EXPORTED
    assert not set(ROUTED) & set(REFUSED)
    assert len(ROUTED) == sum(len(family.models) for family in FAMILIES), "a class is in two families"


def test_families_and_refusals_are_in_order():
    assert list(REFUSED) == sorted(REFUSED)
    assert all(reason.endswith(".") for reason in REFUSED.values())


def test_every_routed_class_has_a_case():
    assert {type(case.build()).__name__ for case in CASES} == set(ROUTED)
    assert len({case.name for case in CASES}) == len(CASES)


def test_the_arguments_of_classes_and_layers_are_those_the_families_were_written_for():
    now, before = signatures(), json.loads(SIGNATURES.read_text())
    changed = [name for name in now if now[name] != before.get(name)]
    assert now == before, f"diffusers changed how these are called, read them again: {changed}"


def test_families_name_arguments_that_exist():
    """A side or stream that no layer takes would be ignored without a word."""
    for name, entry in json.loads(SIGNATURES.read_text()).items():
        family = ROUTED[name]
        taken = {
            stack.name: {a for layer in entry[stack.name].values() for a in layer.split()} for stack in family.stacks
        }
        for stack in family.stacks:
            sides = {side.name.partition(".")[0] for side in stack.sides}
            assert {stack.stream} <= taken[stack.name], (name, stack.stream)
            missing = sides - set().union(*taken.values())
            assert not missing, (name, missing)


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]):
    main(["families", "sana"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "1 routed, 3 refused"
    assert lines[0].startswith("SanaTransformer2DModel")
    assert lines[0].split()[1] == "refused"
    assert REFUSED["SanaTransformer2DModel"] in lines[0]
    main(["families", "FluxTransformer2D"])
    assert capsys.readouterr().out.startswith(
        "FluxTransformer2DModel  routed  19 + 38  transformer_blocks, single_transformer_blocks. Kontext"
    )


def test_the_command_lists_models_outside_diffusers(capsys: pytest.CaptureFixture[str]):
    main(["families", "sit"])
    *lines, total = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [["SiT", "routed", "blocks"], ["SiT", "routed", "blocks."]], (
        "and REPA"
    )
    assert total == "2 routed, 0 refused"


def test_the_command_says_that_nothing_was_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TREAD_DEBUG", "1")
    with pytest.raises(ConfigError, match="no transformer class has 'unet' in its name"):
        main(["families", "unet"])


if __name__ == "__main__":
    SIGNATURES.write_text(json.dumps(signatures(), indent=1) + "\n")
