"""The digits against scikit-learn's own arrays."""

import sys

import numpy as np
import pytest
from sklearn.datasets import load_digits

from tread.data.digits import Digits


def test_the_digits_are_scikit_learns_between_minus_one_and_one() -> None:
    digits, (pixels, labels) = Digits(), load_digits(return_X_y=True)
    assert len(digits) == 1797
    for i in (0, 17, 1796):
        x, label = digits[i]
        np.testing.assert_array_equal((x.numpy().ravel() + 1) * 8, pixels[i])
        assert label == labels[i]
    every = [digits[i] for i in range(len(digits))]
    assert min(x.min() for x, _ in every) == -1
    assert max(x.max() for x, _ in every) == 1
    assert {label for _, label in every} == set(range(10))


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"need scikit-learn: pip install 'tread-diffusion\[demo\]'"):
        Digits()
