"""Methods that a family must define."""

import pytest

from torchtitan.protocols import BaseModel


@pytest.mark.parametrize("name", ["blocks", "units", "flops_per_token"])
def test_a_family_must_say_what_its_layers_are(name):
    """Otherwise it would silently be sharded, compiled and counted as a single layer."""
    model = BaseModel(BaseModel.Config(dim=4))
    with pytest.raises(NotImplementedError):
        getattr(model, name)(*[8] * (name == "flops_per_token"))
