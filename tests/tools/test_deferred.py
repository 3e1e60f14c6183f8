"""Packages whose names are imported on first use."""

import importlib

import pytest


@pytest.mark.parametrize("package", ["data", "checkpoint"])
def test_every_name_exists(package):
    module = importlib.import_module(f"torchtitan.components.{package}")
    assert module.__all__ and all(getattr(module, name) is not None for name in module.__all__)
    with pytest.raises(AttributeError, match=f"'torchtitan.components.{package}' has no attribute"):
        module.absent  # noqa: B018
