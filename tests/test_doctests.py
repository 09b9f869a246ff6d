"""The examples in docstrings run and print what they say."""

import doctest
import importlib
import pkgutil

import pytest

import tread

MODULES = [module.name for module in pkgutil.walk_packages(tread.__path__, "tread.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples():
    found = [example for name in MODULES for example in doctest.DocTestFinder().find(importlib.import_module(name))]
    assert sum(len(example.examples) for example in found) > 10
