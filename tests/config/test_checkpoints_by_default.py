"""Which configurations save checkpoints without being asked to."""

import pytest

from torchtitan.config.registry import built_in_modules, list_module, load_config_function

SECONDS = {"dit_debugmodel", "flux_debugmodel"}
"""Configurations whose steps take milliseconds."""


def _trains_for_a_minute(config) -> bool:
    """Return whether a configuration pre-trains a small model as it is, for 100 steps."""
    is_small = config.training.steps <= 100 and not config.model_converters
    return is_small and getattr(config.dataloader, "dataset", []) == ["stories"]


@pytest.mark.slow
def test_long_runs_save():
    pytest.importorskip("transformers")
    saves = {True: 0, False: 0}
    for module, folder in built_in_modules().items():
        listing = list_module(module, folder)
        for name in set(listing.configs) - set(listing.for_folders):
            config = load_config_function(module, name)()
            is_short = name in SECONDS or _trains_for_a_minute(config)
            assert config.checkpoint.enable == (not is_short), (module, name)
            saves[config.checkpoint.enable] += 1
    assert min(saves.values()) > 20
