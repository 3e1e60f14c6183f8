"""`LoRA`: the converter that puts adapters beside the weights of a model, and trains nothing else."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.components.checkpoint.formats.source import some
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.optimizer import trained_names
from torchtitan.components.peft.adapter_files import AdapterSource, read_adapter, write_adapter
from torchtitan.components.peft.lora import AdaptedLayer, LoRAEmbedding, LoRALinear
from torchtitan.config.configurable import Configurable, config_key
from torchtitan.protocols.conversion import converted_model
from torchtitan.protocols.converter import LayerConverter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

_HEAD = "output"

_MOST_RANKS = 2**24

EXPORTED = "adapter"
"""The folder inside an exported model's that has the adapter by itself."""


class LoRA(LayerConverter):
    """Low-rank adapters on linear layers and, if included, on the embedding (`torchtitan.components.peft.lora`)."""

    changes_weights: ClassVar[bool] = True
    freezes: ClassVar[bool] = True
    converts_head: ClassVar[bool] = True
    run_options: ClassVar[frozenset[str]] = frozenset({"include", "exclude", "dropout", "adapter_path"})
    layer_types: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear, nn.Embedding)

    linear_class: ClassVar[type[LoRALinear]] = LoRALinear
    """What a linear layer becomes."""

    @dataclass(kw_only=True, slots=True)
    class Config(LayerConverter.Config):
        """Adapters: their size, and where they are."""

        include: list[str] = field(default_factory=lambda: [r"\blayers\."])
        """Regular expressions, each searched in the layers' names (layers.0.attention.wq, output, tok_embeddings):
        what they find gets an adapter. By default, all linear layers inside the blocks."""

        rank: int = 16
        """Rank of the adapters, at most the smaller side of every layer that has one."""

        alpha: float = 32.0
        """An adapter's output is multiplied by alpha / rank."""

        rslora: bool = False
        """Multiply by alpha / sqrt(rank) instead, so that large ranks learn as fast (rsLoRA)."""

        dropout: float = 0.0
        """Part of an adapter's inputs that is set to 0 in training."""

        dora: bool = False
        """Train the length of each row of the weights apart from its direction (DoRA)."""

        adapter_path: str = ""
        """Folder with an adapter in PEFT's files (adapter_model.safetensors, adapter_config.json) to begin from; of the
        same layers, rank, alpha and kind. Empty: a new adapter, which changes nothing yet."""

        @property
        def scaling(self) -> float:
            """Factor of an adapter's output."""
            return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

        def validate(self) -> None:
            """Raise `UserError` for values that give no adapter."""
            LayerConverter.Config.validate(self)
            option = f"--model_converters.{config_key(self)}"
            if not 1 <= self.rank <= _MOST_RANKS:
                raise UserError(f"{option}.rank is {self.rank}, and must be at least 1 and at most {_MOST_RANKS}")
            if not 0 < self.alpha < math.inf:
                raise UserError(f"{option}.alpha is {self.alpha}, and must be a number above 0")
            if not 0 <= self.dropout < 1:
                raise UserError(f"{option}.dropout is {self.dropout}, and must be in [0, 1)")

    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        self._trained: set[str] = set()

    def check_model(self, model: nn.Module) -> None:
        """Convert the model that is thrown away.

        Raises:
            UserError: as `convert`.
        """
        super().check_model(model)
        freeze_all_but_adapters(model)

    def convert(self, model: nn.Module) -> None:
        """Give the chosen layers adapters, and freeze all else, in place.

        Raises:
            UserError: as `LayerConverter.convert`; for a layer that cannot have an adapter of this kind.
        """
        super().convert(model)
        freeze_all_but_adapters(model)

    def select(self, model: nn.Module) -> dict[str, nn.Module]:
        """The layers that the patterns choose, by name.

        Raises:
            UserError: as `LayerConverter.select`; for an embedding that is the output head too.
        """
        chosen = super().select(model)
        tied = getattr(model, _HEAD, None) is None
        for name, layer in chosen.items():
            if tied and isinstance(layer, nn.Embedding):
                raise self._refusal(name, "its weights are the output head's too (--model.tie_embeddings)")
        return chosen

    def accepts(self, name: str, layer: nn.Module) -> bool:
        """All layers are accepted.

        Raises:
            UserError: for one that cannot have such an adapter, by name.
        """
        config = self.config
        assert isinstance(layer, (nn.Linear, nn.Embedding))
        shape = tuple(layer.weight.shape)
        if config.rank > min(shape):
            why = f"rank {config.rank} is above the smaller side of its weights, {shape}"
            raise self._refusal(name, why, way_on=f"set rank to at most {min(shape)}, or ")
        if config.dora and isinstance(layer, nn.Embedding):
            raise self._refusal(name, "DoRA is for linear layers")
        if config.dropout and isinstance(layer, nn.Embedding):
            raise self._refusal(name, f"dropout {config.dropout} is of a layer's inputs, and an embedding's are tokens")
        if config.dropout and name == _HEAD:
            raise self._refusal(name, f"dropout {config.dropout} needs a layer's inputs, and the loss has its weights")
        return True

    def _refusal(self, name: str, why: str, *, way_on: str = "") -> UserError:
        key = config_key(self.config)
        return UserError(
            f"--model_converters.{key}: {name} cannot have an adapter: {why}; "
            f"{way_on}leave it out (--model_converters.{key}.exclude)"
        )

    def convert_layer(self, name: str, layer: nn.Module) -> nn.Module:
        """The layer with an adapter."""
        config = self.config
        if isinstance(layer, nn.Embedding):
            return LoRAEmbedding(layer, rank=config.rank, scaling=config.scaling)
        assert isinstance(layer, nn.Linear)
        return self.linear_class(
            layer, rank=config.rank, scaling=config.scaling, dropout=config.dropout, dora=config.dora
        )

    def check_initial_weights(self, spec: ModelSpec, given: Configurable.Config | None) -> None:
        """Open the adapter in `adapter_path`, where there is one.

        Raises:
            UserError: as `AdapterSource`; where the run goes on with other adapters than that one.
        """
        path = self.config.adapter_path
        if path and given is None:
            AdapterSource(Path(path), self.config, converted_model(spec.model, [self]), spec)
            return
        assert given is None or isinstance(given, LoRA.Config)
        if path and given and Path(path).resolve() != Path(given.adapter_path).resolve():
            raise UserError(
                f"--model_converters.{config_key(self.config)}.adapter_path {path}: checkpoint.initial_load_path has "
                "adapters already, which the run goes on with; leave out one of the two"
            )

    def load_initial_weights(self, model_parts: list[nn.Module], spec: ModelSpec) -> None:
        """Begin from the adapter in `adapter_path`, where there is one.

        Raises:
            UserError: as `read_adapter`.
        """
        if self.config.adapter_path:
            model = converted_model(spec.model, [self])
            read_adapter(Path(self.config.adapter_path), self.config, model, spec, model_parts)

    def post_init_hook(self, model_parts: list[nn.Module]) -> None:
        """Remember what the run trains, beside this adapter too."""
        own = [name for part in model_parts for name in trained_names(part)]
        self._trained.update(*Ranks(dist.group.WORLD if dist.is_initialized() else None).gather(own))

    def write_beside_export(
        self, folder: Path, spec: ModelSpec, model: nn.Module, read: Callable[[str], Tensor]
    ) -> None:
        """Write the adapter by itself, in PEFT's files, into the folder `adapter` inside `folder`. Where they cannot
        hold all that was trained, a warning says so: what has been exported so far is of use without."""
        adapted = converted_model(spec.model, [self])
        try:
            check_complete(adapted, self._trained.union(trained_names(model)))
            write_adapter(folder / EXPORTED, self.config, adapted, spec, read)
        except UserError as error:
            logger.warning("no adapter by itself in %s: %s", folder, error)


def check_complete(adapted: nn.Module, trained: set[str]) -> None:
    """Make sure that an adapter is all that a run has trained.

    Args:
        adapted: a model with that adapter, in which nothing else is trained.
        trained: names of the parameters that the run has trained.

    Raises:
        UserError: naming those that are not the adapter's.
    """
    if others := sorted(trained.difference(trained_names(adapted))):
        raise UserError(f"more was trained than one adapter, and PEFT's files hold no more: {some(others)}")


def freeze_all_but_adapters(model: nn.Module) -> None:
    """Let nothing be trained but adapters: norms and embeddings neither."""
    for module in model.modules():
        trained = module.adapter if isinstance(module, AdaptedLayer) else ()
        for name, parameter in module.named_parameters(recurse=False):
            if name not in trained:
                parameter.requires_grad_(False)
