"""Low precision and quantization, computed by torchao: an optional library, which is noisy when it is imported."""

import importlib
import importlib.util
import logging
from typing import Any

from torchtitan.tools.errors import UserError


def check_torchao(option: str) -> None:
    """Raise `UserError` where torchao, which `option` needs, is not installed."""
    if importlib.util.find_spec("torchao") is None:
        raise UserError(
            f"{option} needs torchao: pip install 'torchtitan[quantization]', or EXTRA=quantization ./run_train.sh"
        )


def import_torchao(module: str) -> Any:
    """The module of that name, without the warnings about other parts of torchao that importing it gives."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return importlib.import_module(module)
    finally:
        logging.disable(disabled)
