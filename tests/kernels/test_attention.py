"""Attention's switches: which kernels each name allows, in which order, and what is said where one does not fit.

`cudnn` puts a function in the place of torch's: what it takes is the operator's, what it does not take is torch's. The
other names put one there that makes boolean masks a bias.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.backends import cuda
from torch.nn import functional as F

from tests.programs import run
from tread.errors import ConfigError
from tread.kernels.attention import cudnn, kernel
from tread.kernels.attention.kernel import KERNELS, SAFE, check_attention, explained, relaxed, use_attention
from tread.models import DiT
from tread.pretrain.config import compose
from tread.training.job import make_accelerator

GPU = torch.device("cuda")  # the switches are torch's own and need no GPU to be set
TORCH = kernel._TORCH
AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)
MASK = torch.ones(6, 6, dtype=torch.bool).tril()


def enabled() -> set[str]:
    switches = {
        "flash": cuda.flash_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }
    return {name for name, on in switches.items() if on}


def test_torchs_own_order_is_the_one_that_is_wanted() -> None:
    """It is never set: on some GPUs torch has another one from its first call on, with cuDNN in front."""
    names = {kernel.value: name for name, kernel in KERNELS.items()}
    found = [names[kernel] for kernel in torch._C._get_sdp_priority_order() if kernel in names]
    assert [name for name in found if name != "cudnn"] == list(SAFE)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """A run before this may have left its choice, as one after this would find ours."""
    use_attention("default", GPU)
    yield
    use_attention("default", GPU)
    assert F.scaled_dot_product_attention is TORCH


def test_default_is_what_torch_starts_with() -> None:
    """In a process of its own, where nothing was set before."""
    code = "from tests.kernels.test_attention import GPU, enabled, use_attention; before = enabled(); "
    code += "use_attention('flash', GPU); use_attention('default', GPU); assert enabled() == before, before"
    run("-c", code)


@pytest.fixture
def device_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`device_of(capability)`: the run is on such a GPU."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return lambda found: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: found)


@pytest.mark.parametrize("name", ["flash", "efficient", "math"])
def test_a_name_is_that_kernel_alone(name) -> None:
    use_attention(name, GPU)
    assert enabled() == {name}
    assert F.scaled_dot_product_attention is kernel._by_torch


def test_cudnn_is_our_operator_and_never_torchs_way_to_it() -> None:
    use_attention("cudnn", GPU)
    assert enabled() == set(SAFE), "what does not fit must run too"
    assert F.scaled_dot_product_attention is kernel._by_cudnn


@pytest.mark.parametrize("name", ["auto", "flash", "efficient", "math", "default"])
def test_every_other_choice_takes_the_operator_away(name, device_of) -> None:
    device_of(AMPERE)
    use_attention("cudnn", GPU)
    use_attention(name, GPU)
    assert F.scaled_dot_product_attention is (TORCH if name == "default" else kernel._by_torch)


@pytest.mark.parametrize(("capability", "by_cudnn"), [(AMPERE, False), (HOPPER, True), (BLACKWELL, True)])
def test_auto_prefers_in_its_order_and_can_always_fall_back(capability, by_cudnn: bool, device_of) -> None:
    device_of(capability)
    use_attention("auto", GPU)
    assert enabled() == {"flash", "efficient", "math"}, "flash takes no masks"
    assert F.scaled_dot_product_attention is (kernel._by_cudnn if by_cudnn else kernel._by_torch)


def test_cudnn_is_refused_where_it_is_not(device_of, monkeypatch: pytest.MonkeyPatch) -> None:
    device_of(AMPERE)
    check_attention("cudnn", GPU)
    device_of((7, 5))
    with pytest.raises(ConfigError, match="attention is 'cudnn', which needs an NVIDIA GPU from Ampere on: use 'auto'"):
        check_attention("cudnn", GPU)
    device_of(HOPPER)
    monkeypatch.setattr(torch.version, "cuda", None)  # AMD's GPUs call themselves cuda too
    with pytest.raises(ConfigError, match="NVIDIA"):
        check_attention("cudnn", GPU)
    use_attention("auto", GPU)
    assert F.scaled_dot_product_attention is kernel._by_torch


def test_a_forced_kernel_does_not_bind_other_models(device_of) -> None:
    device_of(AMPERE)
    use_attention("flash", GPU)
    with relaxed("flash", GPU):
        assert enabled() == set(SAFE)
    assert enabled() == {"flash"}


def test_the_last_choice_counts() -> None:
    use_attention("math", GPU)
    use_attention("default", GPU)
    assert enabled() == set(KERNELS)


def test_cpus_are_left_alone() -> None:
    before = enabled()
    for name in ("auto", "default"):
        use_attention(name, torch.device("cpu"))
    assert enabled() == before
    assert F.scaled_dot_product_attention is TORCH
    with pytest.raises(ConfigError) as error:
        check_attention("flash", torch.device("cpu"), "train.attention")
    assert str(error.value) == "train.attention is 'flash', a kernel of GPUs, and this run is on cpu: use 'auto'."


@pytest.mark.skipif(torch.cuda.is_available(), reason="the error is a CPU's")
def test_a_job_refuses_it_before_anything_else() -> None:
    with pytest.raises(ConfigError, match=r"train\.attention is 'cudnn', a kernel of GPUs"):
        make_accelerator(compose(["train.attention=cudnn"]))


Calls = list[tuple[str, tuple[Any, ...], dict[str, Any]]]


@pytest.fixture
def calls() -> Iterator[Calls]:
    """Who was called with what: `cudnn` or `torch`, which both compute what they do."""
    found: Calls = []

    def watched(name: str, function: Any) -> Any:
        return lambda *args, **kwargs: found.append((name, args, kwargs)) or function(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cudnn, "attend", watched("cudnn", cudnn.attend))
        patch.setattr(kernel, "_TORCH", watched("torch", TORCH))
        yield found


def test_what_fits_is_the_operators(calls: Calls) -> None:
    use_attention("cudnn", GPU)
    with FakeTensorMode():  # tensors of a GPU, without one
        q, k, v = (torch.empty(2, 3, tokens, 64, device="cuda", dtype=torch.bfloat16) for tokens in (16, 5, 5))
        out = F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(query=q, key=k, value=v, dropout_p=0.0, is_causal=False, scale=0.5)
    assert out.shape == q.shape
    (first, given, _), (second, others, _) = calls
    assert (first, second) == ("cudnn", "cudnn")
    assert all(one is other for one, other in zip(given, (q, k, v, None, None), strict=True))
    assert others[4] == 0.5


@pytest.mark.parametrize("mask", [MASK, torch.randn(6, 6)], ids=["boolean", "numbers"])
def test_masks_are_the_operators_too_and_groups_of_heads_are_repeated_for_them(
    mask: Tensor, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_attention("cudnn", GPU)
    monkeypatch.setattr(cudnn, "fits", lambda *_: True)
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    found = F.scaled_dot_product_attention(q, k, k, mask, scale=0.5, enable_gqa=True)
    assert [name for name, _, _ in calls] == ["cudnn"]
    assert (found - TORCH(q, k, k, mask, scale=0.5, enable_gqa=True)).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["flash", "efficient", "math", "auto", "cudnn"])
def test_a_boolean_mask_reaches_torchs_kernels_as_a_bias(name, device_of, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the dtype of the queries; numbers pass as they are, and so does everything where torch decides."""
    device_of(AMPERE)
    given: list[Tensor] = []
    with FakeTensorMode(), monkeypatch.context() as patch:
        patch.setattr(kernel, "_TORCH", lambda _q, _k, _v, mask, *_, **__: given.append(mask))
        q = torch.empty(2, 3, 16, 64, device="cuda")  # float32, which cuDNN does not take
        masks = [torch.empty(2, 1, 1, 16, device="cuda", dtype=dtype) for dtype in (torch.bool, torch.float32)]
        for choice in (name, "default"):
            use_attention(choice, GPU)
            for mask in masks:
                F.scaled_dot_product_attention(q, q, q, mask)
    bias, numbers, *unchanged = given
    assert (bias.dtype, bias.shape) == (torch.float32, masks[0].shape)
    assert numbers is masks[1]
    assert all(one is other for one, other in zip(unchanged, masks, strict=True))


def test_autocast_is_followed_as_torchs_own_does(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    use_attention("cudnn", GPU)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: {"cuda": torch.bfloat16}[device])
    monkeypatch.setattr(Tensor, "to", lambda x, dtype: torch.empty(x.shape, device=x.device, dtype=dtype))
    biases: list[Tensor] = []
    with FakeTensorMode():
        q, k = (torch.empty(2, 3, 16, 64, device="cuda", dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
        out = F.scaled_dot_product_attention(q, k, q)
        use_attention("efficient", GPU)
        with monkeypatch.context() as patch:  # torch's own casts its inputs
            patch.setattr(kernel, "_TORCH", lambda _q, _k, _v, bias, *_, **__: biases.append(bias))
            F.scaled_dot_product_attention(q, q, q, torch.empty(2, 1, 1, 16, device="cuda", dtype=torch.bool))
    assert [name for name, _, _ in calls] == ["cudnn"]
    assert out.dtype == biases[0].dtype == torch.bfloat16


def test_a_mask_that_does_not_fit_is_torchs(calls: Calls) -> None:
    use_attention("cudnn", GPU)
    with FakeTensorMode():
        q = torch.empty(2, 3, 16, 64, device="cuda", dtype=torch.bfloat16)
        F.scaled_dot_product_attention(q, q, q, torch.empty(2, 3, 16, 1, device="cuda", dtype=torch.bool))
    assert [name for name, _, _ in calls] == ["torch"]


@pytest.mark.parametrize(
    "settings",
    [
        {"dropout_p": 0.5},
        {"dropout_p": 0.5, "attn_mask": MASK},
        {"is_causal": True},
        {"is_causal": True, "scale": 0.3},
    ],
)
def test_dropout_and_causal_order_are_torchs(settings, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that was given, whatever the tensors are."""
    use_attention("cudnn", GPU)
    monkeypatch.setattr(cudnn, "fits", lambda *_: True)
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 4, 6, 8)
    torch.manual_seed(0)
    found = F.scaled_dot_product_attention(q, k, q, **settings)
    torch.manual_seed(0)
    assert found.equal(TORCH(q, k, q, **settings))
    assert [name for name, _, _ in calls] == ["torch"]


def test_what_does_not_fit_is_torchs(calls: Calls) -> None:
    use_attention("cudnn", GPU)
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 4, 6, 8)
    grouped = {"scale": 0.3, "enable_gqa": True}
    assert F.scaled_dot_product_attention(q, k, q).equal(TORCH(q, k, q)), "a CPU's"
    assert F.scaled_dot_product_attention(q, k, q, MASK, 0.0, False, scale=0.3).equal(TORCH(q, k, q, MASK, scale=0.3))
    assert F.scaled_dot_product_attention(q, k[:, :1], k[:, :1], **grouped).equal(
        TORCH(q, k[:, :1], k[:, :1], **grouped)
    )
    assert [name for name, _, _ in calls] == ["torch"] * 3


def test_a_model_goes_through_it(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward and its gradients, as with torch's function."""
    torch.manual_seed(0)
    model = DiT(input_size=4, patch=1, in_channels=1, depth=2, width=32, heads=2, num_classes=3).train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    given = torch.randn(2, 1, 4, 4), torch.rand(2), torch.tensor([0, 1])
    results: list[list[Tensor]] = []
    for fits in (False, True):
        use_attention("cudnn", GPU)
        monkeypatch.setattr(cudnn, "fits", lambda *_, fits=fits: fits)
        out = model(*given)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), [*model.blocks.parameters()])])
    assert [name for name, _, _ in calls] == ["torch", "torch", "cudnn", "cudnn"]
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max())) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("words", ["No available kernel. Aborting execution.", "Invalid backend"])
def test_a_kernel_that_does_not_fit_is_named(words: str) -> None:
    def unavailable() -> None:
        raise RuntimeError(words)

    with pytest.raises(ConfigError) as error, explained("flash"):
        unavailable()
    assert str(error.value) == (
        "attention is 'flash', and that kernel cannot compute this model's attention (its masks, head size or "
        "precision); set attention to 'auto', or to another of: auto, flash, cudnn, efficient, math, default."
    )
    with pytest.raises(RuntimeError, match="another"), explained("flash"):
        raise RuntimeError("another")


@pytest.mark.gpu
def test_masks_fall_back_and_forced_flash_refuses_them() -> None:
    q = torch.randn(1, 2, 16, 64, device="cuda", dtype=torch.bfloat16)
    mask = torch.ones(1, 1, 16, 16, device="cuda", dtype=torch.bool).tril()
    use_attention("auto", GPU)
    found = F.scaled_dot_product_attention(q, q, q, mask)
    use_attention("math", GPU)
    assert (found - F.scaled_dot_product_attention(q, q, q, mask)).abs().max() < 0.05
    use_attention("flash", GPU)
    with pytest.raises(ConfigError, match="attention is 'flash', and that kernel cannot"), explained("flash"):
        F.scaled_dot_product_attention(q, q, q, mask)
