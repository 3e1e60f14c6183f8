"""Initial values of a class of transformers, the same for every layout, as in our families.

Linear layers and embeddings are normal with the class's standard deviation, drawn shard by shard.
The others, such as norms and decay rates, are what the class's constructor and own initialization
give, for one block at a time."""

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from torchtitan.protocols.initializer import TruncatedNormal, with_initializers
from torchtitan.protocols.model import BaseModel
from torchtitan.tools.torch_private import device_constructors, write_count

_SMALL = 2**20
"""Elements of the largest tensor that keeps, in memory, the value that its class's constructor
gives."""


def add_initializers(model: nn.Module) -> None:
    """Attach initial distributions to the linear layers and embeddings of a class on the meta
    device, except those that it initializes as parts of other modules, such as projections of
    Mamba."""
    owned = list(_with_owners(model))
    # Subclasses may compute their weights.
    simple = {module: owner for owner, module in owned if type(module) in (nn.Linear, nn.Embedding)}
    counts = {module: write_count(module.get_parameter("weight")) for module in simple}
    for owner, module in owned:
        if module not in simple:
            owner._init_weights(module)
    for module, owner in simple.items():
        if write_count(module.get_parameter("weight")) == counts[module]:
            stds = (
                getattr(owner.config, key, None)
                for key in ("initializer_range", "init_std", "initializer_factor")
            )
            with_initializers(
                module, weight=TruncatedNormal(next((std for std in stds if std), 0.02))
            )


class _SmallTensors(TorchFunctionMode):
    """Puts tensors of at most `_SMALL` elements into memory, and others on the meta device."""

    def __torch_function__(
        self,
        func: Callable[..., Tensor],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> Tensor:
        kwargs = kwargs or {}
        if func in device_constructors() and kwargs.get("device") is None:
            size = func(*args, **{**kwargs, "device": "meta"}).numel()
            kwargs = {**kwargs, "device": "cpu" if size <= _SMALL else "meta"}
        return func(*args, **kwargs)


@torch.no_grad()
def class_values(
    config: BaseModel.Config, names: Sequence[str], seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the values of `names`, tensors of the model of `config`, by the class's constructor and
    initialization. The random numbers of a block depend on `seed` and its name."""
    with torch.random.fork_rng(devices=[]), _SmallTensors():
        torch.manual_seed(seed)
        plain: BaseModel = config.build()
    blocks, of_unit = plain.blocks(), dict[str, list[str]]()
    for name in names:
        *outer, module_name = itertools.accumulate(name.split(".")[:-1], "{}.{}".format)
        of_unit.setdefault(
            next((path for path in outer if path in blocks), module_name), []
        ).append(name)
    owners = {module: owner for owner, module in _with_owners(plain)}
    for unit, members in of_unit.items():
        places = {
            name: (plain.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name in members
        }
        for module, own_name in places.values():
            tensor = getattr(module, own_name)
            if tensor.is_meta:
                unset = math.nan if tensor.is_floating_point() else 0
                _replace(module, own_name, torch.full_like(tensor, unset, device="cpu"))
        with torch.random.fork_rng(devices=[]):
            digest = hashlib.blake2b(f"{seed}/{unit}".encode(), digest_size=8).digest()
            torch.manual_seed(int.from_bytes(digest, "big") >> 1)
            within = list(plain.get_submodule(unit).modules())
            around = [
                plain.get_submodule(unit.rsplit(".", i)[0]) for i in range(1, unit.count(".") + 1)
            ]
            # a parent after its children, since it may set their values
            for part in (*reversed(within), *around):
                if part in owners:
                    owners[part]._init_weights(part)
        for name, (module, own_name) in places.items():
            value = getattr(module, own_name)
            _replace(module, own_name, torch.empty_like(value, device="meta"))
            yield name, value.detach()


def _replace(module: nn.Module, name: str, tensor: Tensor) -> None:
    is_parameter = isinstance(getattr(module, name), nn.Parameter)
    setattr(module, name, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)


def _with_owners(
    module: nn.Module, owner: PreTrainedModel | None = None
) -> Iterator[tuple[PreTrainedModel, nn.Module]]:
    """Yield every module with the innermost model of transformers around it, whose `_init_weights`
    initializes it."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    if owner is not None:
        yield owner, module
    for child in module.children():
        yield from _with_owners(child, owner)
