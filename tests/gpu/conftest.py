"""float32 is float32, and nothing compiled stays behind."""

from collections.abc import Iterator

import pytest
import torch
import torch._inductor.config


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No TF32, in products of matrices and in convolutions.

    By the old names: since torch 2.9 they must not be mixed with `fp32_precision`, and the compiler reads these.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """A layer that is compiled too often fails instead of running eagerly; several test processes share the cores."""
    limits = {"recompile_limit": 64, "fail_on_recompile_limit_hit": True}
    torch._dynamo.reset()
    with torch._dynamo.config.patch(limits), torch._inductor.config.patch(compile_threads=2):
        yield
    torch._dynamo.reset()
