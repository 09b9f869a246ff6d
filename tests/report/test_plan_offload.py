"""`tread plan --offload`: weights by layer against the stock classes, what a card needs, and where copies limit."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tread.attach.registry import layers_of
from tread.cli import main
from tread.kernels.offload import ring
from tread.report.planning.estimate import estimate
from tread.report.planning.models import find_model
from tread.report.planning.offload import CARDS, fewest_layers, offloaded, offloading
from tread.report.planning.settings import make_run
from tread.report.planning.tables import GIB, RESERVED
from tread.report.planning.weights import layer_bytes, moved, weight_bytes
from tread.routing.plan import RoutePlan

pytestmark = pytest.mark.filterwarnings("ignore")


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    main(["plan", *words, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("flux", "FluxTransformer2DModel"),
        ("wan", "WanTransformer3DModel"),
        ("qwen_image", "QwenImageTransformer2DModel"),
    ],
)
def test_the_weights_of_a_layer_are_those_of_the_stock_class(name: str, cls: str) -> None:
    """The shares are found from FLOPs, the classes are counted parameter by parameter."""
    import diffusers

    with torch.device("meta"):
        model = getattr(diffusers, cls)()
    linears = [
        sum(2 * one.weight.numel() for one in layer.modules() if isinstance(one, nn.Linear))
        for layer in layers_of(model)
    ]
    assert layer_bytes(find_model(name), "bf16") == pytest.approx(linears, rel=0.01)


def test_offloaded_layers_leave_the_weights_and_slots_stay(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("flux", "--precision", "fp8", "--checkpointing")
    whole, some = planned(capsys, *words), planned(capsys, *words, "--offload", "20")
    away, slots = moved(find_model("flux"), "fp8", 20)
    assert slots == ring.SLOTS * max(layer_bytes(find_model("flux"), "fp8"))
    for how in ("dense", "routed"):
        assert whole["memory"][how]["weights"] - some["memory"][how]["weights"] == pytest.approx(away - slots)
        rest = {part: size for part, size in some["memory"][how].items() if part != "weights"}
        assert rest == {part: whole["memory"][how][part] for part in rest}
    assert whole["fits"] == some["fits"]


def test_the_fewest_layers_fit_the_card_and_one_less_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    told = planned(capsys, "flux", "--precision", "bf16")
    (found,) = (one for one in told["offload"] if one["precision"] == "bf16")
    for card in CARDS:
        number = found["fewest"][str(card)]
        fits = [
            planned(capsys, "flux", "--offload", str(n))["gib"]["routed"] <= card - RESERVED
            for n in (number, number - 1)
        ]
        assert fits == [True, False]
    assert planned(capsys, "flux", "--offload", "auto")["settings"]["offload"] == found["fewest"]["8"]


def test_copies_hide_longer_on_a_faster_link_and_behind_all_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """TFLOP/s = FLOPs of the forward over the seconds in which the layers are copied."""
    told = planned(capsys, "flux", "--precision", "fp8", "--checkpointing")
    (found,) = (one for one in told["offload"] if one["precision"] == "fp8")
    plain = planned(capsys, "flux", "--precision", "fp8")
    forward = told["flops"]["dense"] - plain["flops"]["dense"]
    seconds = sum(layer_bytes(find_model("flux"), "fp8")) / 12e9
    assert found["hides"]["12"][0] == pytest.approx(forward / seconds / 1e12, rel=1e-6)
    assert found["hides"]["25"][0] == pytest.approx(25 / 12 * found["hides"]["12"][0])
    assert found["hides"]["12"][1] < found["hides"]["12"][0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("flux", "--offload", "58"), "give a number of layers up to 57, or auto"),
        (("flux", "--offload", "some"), "give a number of layers up to 57, or auto"),
        (("flux", "--full", "--offload", "3"), "all weights are trained"),
        (("flux", "--gpus", "2", "--offload", "3"), "for the report of one GPU"),
    ],
)
def test_errors(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", *words])
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_weights_that_cannot_be_moved_are_not_offloaded(capsys: pytest.CaptureFixture[str]) -> None:
    """As in `tread finetune`, which refuses int8-bnb beside offload."""
    main(["plan", "flux", "--precision", "int8-bnb", "--json"])
    told = json.loads(capsys.readouterr().out)["offload"]
    assert [one["precision"] for one in told] == ["bf16", "fp8", "nf4"]
    with pytest.raises(SystemExit):
        main(["plan", "flux", "--precision", "int8-bnb", "--offload", "auto"])
    said = capsys.readouterr().err
    assert "--offload is auto, but --precision is int8-bnb, whose weights cannot be moved: use int8 or nf4." in said


def test_layers_have_all_packed_bytes_with_their_scales() -> None:
    for name in ("flux", "wan", "qwen_image"):
        model = find_model(name)
        for precision in ("bf16", "int8", "int4", "nf4"):
            count = model.weights
            others = 2 * (count["all"] - count["packed"] + count["float32"]) + count["buffers"]
            assert sum(layer_bytes(model, precision)) == pytest.approx(weight_bytes(model, precision) - others)


def test_offloaded_layers_are_evenly_spread_and_have_no_more_slots_than_layers() -> None:
    model = find_model("flux")
    sizes = layer_bytes(model, "bf16")
    assert max(sizes) > min(sizes)
    assert moved(model, "bf16", 0) == (0, 0)
    assert moved(model, "bf16", 1) == (sizes[0], sizes[0]), "one layer alone has nowhere to go"
    assert moved(model, "bf16", 19)[0] == pytest.approx(sum(sizes[::3]))
    assert moved(model, "bf16", 57)[0] == pytest.approx(sum(sizes))


def test_all_layers_may_be_needed_and_may_not_be_enough() -> None:
    model = find_model("flux")
    (away, slots), most = moved(model, "bf16", 57), 12 - RESERVED
    assert fewest_layers(model, "bf16", most, 12) == 0
    assert fewest_layers(model, "bf16", most + (away - slots) / GIB - 1e-6, 12) == 57
    assert fewest_layers(model, "bf16", most + (away - slots) / GIB + 0.01, 12) is None
    plan = RoutePlan.from_config("lora").resolve(model.depth)
    assert offloaded(model, make_run(model, batch=64), plan, "auto").offload == 57, "no card is large enough"


def test_offloaded_runs_are_checkpointed_and_have_no_graphs() -> None:
    model = find_model("flux")
    plan = RoutePlan.from_config("lora").resolve(model.depth)
    run = make_run(model, graphs=True, batch=4)
    assert offloaded(model, run, plan, "57") == replace(run, checkpointing="full", graphs=False, offload=57)
    assert offloaded(model, run, plan, "0") == run
    found = offloading(model, run, plan)
    assert found == offloading(model, offloaded(model, run, plan, "20"), plan), "whatever is offloaded already"
    whole = estimate(model, offloaded(model, run, plan, "1"), plan).gib[1]  # one layer has its own slot
    assert found[0].fewest == {card: fewest_layers(model, "bf16", whole, card) for card in CARDS}
    assert found[0].layer_gib == max(layer_bytes(model, "bf16")) / GIB
