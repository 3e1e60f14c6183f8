"""Imports for the fork server of `tests.processes`, from which processes start in tens of
milliseconds. Nothing here may start a thread or compute, since only the forking thread exists in
the new process."""

import gc
import sys
from pathlib import Path

import datasets  # noqa: F401
import pytest  # noqa: F401
import rich.progress  # noqa: F401
import tokenizers  # noqa: F401
import torch._inductor.compile_fx  # noqa: F401
import torch._inductor.pattern_matcher  # noqa: F401
import torch.distributed.checkpoint  # noqa: F401
import torch.distributed.checkpoint.state_dict  # noqa: F401
import torch.distributed.pipelining  # noqa: F401
import torch.distributed.run  # noqa: F401
import torch.distributed.tensor.parallel  # noqa: F401
import torch.multiprocessing  # noqa: F401
import torch.utils.tensorboard  # noqa: F401
import transformers.processing_utils  # noqa: F401

import tests.conftest  # noqa: F401
import tests.training  # noqa: F401
import torchtitan.cli.convert  # noqa: F401
import torchtitan.cli.generate  # noqa: F401
import torchtitan.cli.main  # noqa: F401
import torchtitan.cli.run  # noqa: F401
import torchtitan.cli.train  # noqa: F401
import torchtitan.components.chat_template.replay  # noqa: F401
import torchtitan.components.checkpoint.dcp  # noqa: F401
from torchtitan.config.manager import ConfigManager
from torchtitan.config.registry import built_in_modules, import_package

for module in built_in_modules():
    import_package(module)

ConfigManager().parse_args([])  # the first one imports parsers and reads the docstrings of options

PATH = [
    folder for folder in sys.path if folder not in ("", str(Path(__file__).resolve().parent.parent))
]
"""The import path of an interpreter, without folders that depend on the way it is started."""

gc.freeze()  # collections in forked processes neither scan nor copy these objects
gc.enable()  # which `tests.uncollected` has disabled
