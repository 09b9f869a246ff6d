"""Selective checkpointing of every attached family: gradients are those of the layers as they are."""

import pytest
from diffusers.models.modeling_utils import ModelMixin

import tread
from tests.attach.selected import route
from tests.attach.test_contract import assert_same, every_case, gradients
from tests.tiny.case import Case
from tread.kernels import checkpointing

pytestmark = pytest.mark.filterwarnings("ignore::tread.routing.risks.RiskWarning")


@every_case
def test_selective_checkpointing_changes_nothing(case: Case, monkeypatch: pytest.MonkeyPatch):
    """Every product and attention kept, the rest computed again; routing is outside of both."""
    if "checkpoint" in case.defects:
        pytest.xfail(case.defects["checkpoint"])
    model, arguments = case.model(), case.inputs(case.batch)
    if not getattr(model, "_supports_gradient_checkpointing", False) or not isinstance(model, ModelMixin):
        pytest.skip("the stock class has no gradient checkpointing whose function is another's to choose")
    monkeypatch.setattr(checkpointing, "LEAST", 1)  # the products of so small a model are dear too
    with tread.attach(model, {"routes": [route(min(1, case.depth - 1), -1)]}) as handle:
        handle.set_step(0)
        expected = gradients(case.call(model, arguments), model)
        model.enable_gradient_checkpointing(checkpointing.recomputing("selective"))
        handle.set_step(0)
        assert_same(gradients(case.call(model, arguments), model), expected, rtol=1e-6, atol=1e-6)
        model.disable_gradient_checkpointing()
