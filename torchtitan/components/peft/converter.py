"""`LoRA` and `QLoRA`: converters that add adapters to the weights of a model and train nothing else."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from torchtitan.components.optimizer import trained_names
from torchtitan.components.peft.adapter_files import AdapterSource, read_adapter, write_adapter
from torchtitan.components.peft.lora import AdaptedLayer, LoRAEmbedding, LoRALinear, QLoRALinear
from torchtitan.components.quantization.nf4 import BLOCK_SIZE
from torchtitan.config.configurable import Configurable, config_key
from torchtitan.distributed.process_group import gather_objects
from torchtitan.protocols.conversion import converted_model
from torchtitan.protocols.converter import LayerConverter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.tensor_source import summarize_names
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

_HEAD = "output"

_MOST_RANKS = 2**24

EXPORTED = "adapter"
"""Subfolder of an exported model with the separate adapter."""


class LoRA(LayerConverter):
    """Low-rank adapters on linear layers and, if included, on the embedding (`torchtitan.components.peft.lora`)."""

    changes_weights: ClassVar[bool] = True
    freezes: ClassVar[bool] = True
    converts_head: ClassVar[bool] = True
    run_options: ClassVar[frozenset[str]] = frozenset({"include", "exclude", "dropout", "adapter_path"})
    layer_types: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear, nn.Embedding)

    linear_class: ClassVar[type[LoRALinear]] = LoRALinear
    """Class of adapted linear layers."""

    @dataclass(kw_only=True, slots=True)
    class Config(LayerConverter.Config):
        """Adapters: size and location."""

        include: list[str] = field(default_factory=lambda: [r"\blayers\."])
        """Regular expressions, each searched in the layers' names (layers.0.attention.wq, output, tok_embeddings):
        layers that match get an adapter. By default, all linear layers inside the blocks."""

        rank: int = 16
        """Rank of the adapters, at most the smaller side of every adapted layer."""

        alpha: float = 32.0
        """An adapter's output is multiplied by alpha / rank."""

        rslora: bool = False
        """Multiply by alpha / sqrt(rank) instead, so that large ranks learn as fast (rsLoRA)."""

        dropout: float = 0.0
        """Fraction of an adapter's inputs set to 0 in training."""

        dora: bool = False
        """Train the length of each row of the weights separately from its direction (DoRA)."""

        adapter_path: str = ""
        """Folder with an adapter in PEFT's files (adapter_model.safetensors, adapter_config.json) to start from, of the
        same layers, rank, alpha and kind. Empty: a new adapter, which has no effect yet."""

        @property
        def scaling(self) -> float:
            return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

        def validate(self) -> None:
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

    def convert(self, model: nn.Module) -> None:
        super().convert(model)
        freeze_all_but_adapters(model)

    def select(self, model: nn.Module) -> dict[str, nn.Module]:
        chosen = super().select(model)
        tied = getattr(model, _HEAD, None) is None
        for name, layer in chosen.items():
            if tied and isinstance(layer, nn.Embedding):
                raise self._refusal(name, "its weights are the output head's too (--model.tie_embeddings)")
        return chosen

    def accepts(self, name: str, layer: nn.Module) -> bool:
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
        option = f"--model_converters.{config_key(self.config)}"
        return UserError(f"{option}: {name} cannot have an adapter: {why}; {way_on}leave it out ({option}.exclude)")

    def convert_layer(self, name: str, layer: nn.Module) -> nn.Module:
        config = self.config
        if isinstance(layer, nn.Embedding):
            return LoRAEmbedding(layer, rank=config.rank, scaling=config.scaling)
        assert isinstance(layer, nn.Linear)
        return self.linear_class(
            layer, rank=config.rank, scaling=config.scaling, dropout=config.dropout, dora=config.dora
        )

    def check_initial_weights(self, spec: ModelSpec, given: Configurable.Config | None) -> None:
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
        if self.config.adapter_path:
            model = converted_model(spec.model, [self])
            read_adapter(Path(self.config.adapter_path), self.config, model, spec, model_parts)

    def post_init_hook(self, model_parts: list[nn.Module]) -> None:
        """Remember everything the run trains, including other parameters than this adapter's."""
        self._trained.update(*gather_objects([name for part in model_parts for name in trained_names(part)]))

    def write_export_files(
        self, folder: Path, spec: ModelSpec, model: nn.Module, read: Callable[[str], Tensor]
    ) -> None:
        """Write the adapter alone, in PEFT's files, into `adapter`; warn if they cannot hold all trained parameters."""
        adapted = converted_model(spec.model, [self])
        try:
            check_complete(adapted, self._trained.union(trained_names(model)))
            write_adapter(folder / EXPORTED, self.config, adapted, spec, read)
        except UserError as error:
            logger.warning("no adapter by itself in %s: %s", folder, error)


class QLoRA(LoRA):
    """Low-rank adapters on linear layers with 4-bit weights. An adapted embedding keeps its precision."""

    linear_class = QLoRALinear

    @dataclass(kw_only=True, slots=True)
    class Config(LoRA.Config):
        """Adapters of weights in 4 bits (NF4): size and location."""

    def accepts(self, name: str, layer: nn.Module) -> bool:
        if isinstance(layer, nn.Linear) and layer.in_features % BLOCK_SIZE:
            why = f"weights in 4 bits need a multiple of {BLOCK_SIZE} inputs, not {layer.in_features}"
            raise self._refusal(name, why)
        return super().accepts(name, layer)


def check_complete(adapted: nn.Module, trained: set[str]) -> None:
    """Raise `UserError` if parameters in `trained`, which a run has trained, are not of the adapter in `adapted`."""
    if others := sorted(trained.difference(trained_names(adapted))):
        raise UserError(f"more was trained than one adapter, and PEFT's files hold no more: {summarize_names(others)}")


def freeze_all_but_adapters(model: nn.Module) -> None:
    """Freeze all parameters except adapters, including norms and embeddings."""
    for module in model.modules():
        trained = module.adapter if isinstance(module, AdaptedLayer) else ()
        for name, parameter in module.named_parameters(recurse=False):
            if name not in trained:
                parameter.requires_grad_(False)
