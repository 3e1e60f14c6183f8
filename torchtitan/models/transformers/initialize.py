"""Initial values of a class of transformers: the same for every layout, like those of our families.

Linear layers and embeddings, nearly all weights, are normal with the class's standard deviation, drawn shard by shard.
The others, such as norms, decay rates and RoPE's frequencies, are what the class's own initialization gives, for one
block at a time.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchtitan.protocols.initializer import TruncatedNormal, with_initializers
from torchtitan.protocols.model import BaseModel
from torchtitan.tools.torch_private import device_constructors

_STD_KEYS = ("initializer_range", "init_std", "initializer_factor")
_DEFAULT_STD = 0.02


def add_initializers(model: nn.Module) -> None:
    """Attach initial distributions to the linear layers and embeddings of a class."""
    for owner, module in _with_owners(model):
        if type(module) not in (nn.Linear, nn.Embedding):  # subclasses may compute their weights
            continue
        stds = (getattr(owner.config, key, None) for key in _STD_KEYS)
        std = next((std for std in stds if std), _DEFAULT_STD)
        with_initializers(module, weight=TruncatedNormal(std))


@torch.no_grad()
def class_values(plain: BaseModel, names: Sequence[str], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the values of `names`, tensors of the model `plain` on the meta device, by the class's initialization. The
    random numbers of a block depend on `seed` and its name."""
    of_unit: dict[str, list[str]] = {}
    for name in names:
        inside = [block for block in plain.blocks() if name.startswith(f"{block}.")]
        of_unit.setdefault(inside[0] if inside else name.rpartition(".")[0], []).append(name)
    owners = {id(module): owner for owner, module in _with_owners(plain)}
    constructed: BaseModel | None = None
    for unit, members in of_unit.items():
        places = {name: (plain.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in members}
        for module, own_name in places.values():
            empty = torch.empty_like(getattr(module, own_name), device="cpu")
            _replace(module, own_name, empty.fill_(math.nan) if empty.is_floating_point() else empty.zero_())
        with torch.random.fork_rng(devices=[]):
            digest = hashlib.blake2b(f"{seed}/{unit}".encode(), digest_size=8).digest()
            torch.manual_seed(int.from_bytes(digest, "big") >> 1)
            within = list(plain.get_submodule(unit).modules())
            around = [plain.get_submodule(unit.rsplit(".", i)[0]) for i in range(1, unit.count(".") + 1)]
            for part in (*reversed(within), *around):  # a parent after its children, for which it may have values
                if id(part) in owners:
                    owners[id(part)]._init_weights(part)
        for name, (module, own_name) in places.items():
            value = getattr(module, own_name)
            _replace(module, own_name, torch.empty_like(value, device="meta"))
            if value.isnan().any():
                constructed = constructed or _construct(plain, seed)
                value = getattr(constructed.get_submodule(name.rpartition(".")[0]), own_name)
            yield name, value.detach()


_SMALL = 2**20
"""Elements of the largest tensor that is built in memory for the value that its class's constructor gives."""


def _construct(plain: BaseModel, seed: int) -> BaseModel:
    """Return the model with its small tensors in memory, as constructed: some classes set values only there."""

    class SmallTensors(TorchFunctionMode):
        """Puts tensors of at most `_SMALL` elements into memory, and others on the meta device."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func in device_constructors() and kwargs.get("device") is None:
                size = func(*args, **{**kwargs, "device": "meta"}).numel()
                kwargs = {**kwargs, "device": "cpu" if size <= _SMALL else "meta"}
            return func(*args, **kwargs)

    with torch.random.fork_rng(devices=[]), SmallTensors():
        torch.manual_seed(seed)
        constructed: BaseModel = plain.config.build()
    return constructed


def _replace(module: nn.Module, name: str, tensor: Tensor) -> None:
    is_parameter = isinstance(getattr(module, name), nn.Parameter)
    setattr(module, name, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)


def _with_owners(module: nn.Module, owner: Any = None) -> Iterator[tuple[Any, nn.Module]]:
    """Yield every module with the innermost model of transformers around it, whose `_init_weights` initializes it."""
    from transformers import PreTrainedModel

    owner = module if isinstance(module, PreTrainedModel) else owner
    if owner is not None:
        yield owner, module
    for child in module.children():
        yield from _with_owners(child, owner)
