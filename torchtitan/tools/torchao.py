"""Import of torchao, an optional dependency."""

import importlib
import importlib.util
import logging
from typing import Any

from torchtitan.tools.errors import UserError


def check_torchao(option: str) -> None:
    """Raise `UserError` if torchao, which `option` requires, is not installed."""
    if importlib.util.find_spec("torchao") is None:
        raise UserError(
            f"{option} requires torchao: pip install 'torchtitan[quantization]', or EXTRA=quantization ./run_train.sh"
        )


def import_torchao(module: str) -> Any:
    """Import a torchao module without torchao's log messages."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return importlib.import_module(module)
    finally:
        logging.disable(disabled)
