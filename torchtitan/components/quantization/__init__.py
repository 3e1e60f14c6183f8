"""Low precision and quantization by torchao, an optional library that is noisy when imported."""

import importlib
import importlib.util
import logging
from typing import Any

from torchtitan.tools.errors import UserError


def check_torchao(option: str) -> None:
    """Raise `UserError` if torchao, which `option` needs, is not installed."""
    if importlib.util.find_spec("torchao") is None:
        raise UserError(
            f"{option} needs torchao: pip install 'torchtitan[quantization]', or EXTRA=quantization ./run_train.sh"
        )


def import_torchao(module: str) -> Any:
    """Import the module of that name, without torchao's warnings about its other parts."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return importlib.import_module(module)
    finally:
        logging.disable(disabled)
