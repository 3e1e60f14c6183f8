"""Import of torchao, an optional dependency."""

import importlib
import importlib.util
from typing import Any

from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import without_logs


def check_torchao(option: str) -> None:
    """Raise `UserError` if torchao, which `option` requires, is not installed."""
    if importlib.util.find_spec("torchao") is None:
        raise UserError(
            f"{option} requires torchao: pip install 'torchtitan[quantization]', or "
            "EXTRA=quantization ./run_train.sh"
        )


def import_torchao(module: str) -> Any:
    """Import a torchao module without torchao's log messages."""
    with without_logs():
        return importlib.import_module(module)
