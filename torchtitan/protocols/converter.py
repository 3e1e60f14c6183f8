"""Rewrites of a model's modules that compose with everything else: `ModelConverter`, and `LayerConverter` by name."""

import contextlib
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from torchtitan.config import CompileConfig, Configurable, ParallelismConfig, TrainingConfig
from torchtitan.config.configurable import config_key
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger
from torchtitan.tools.patterns import check_choice, choose, without_numbers

_HEAD = "output"
"""The loss reads this layer's weights, so that the layer is never called (`Decoder.output_weight`)."""

_CONVERTED_BY = "converted_by"


class ModelConverter(Configurable):
    """Rewrite modules in place, in the order of `Trainer.Config.model_converters`. Hooks, in order: `convert`; at the
    start of the run, `load_initial_weights` and `post_init_hook`; at every step, `pre_step_hook` and
    `post_optimizer_hook`. They do nothing unless overridden."""

    changes_weights: ClassVar[bool] = False
    """True if tensors differ from the plain model's (`ConvertedModule`): checkpoints then name the converters."""

    simulates: ClassVar[bool] = False
    """True if the run computes as its model after quantization by `torchtitan convert`: checkpoints describe how."""

    run_options: ClassVar[frozenset[str]] = frozenset()
    """Config fields that may change when a run resumes: training, initial values, and facts visible in names and
    shapes. All others determine the meaning of the weights."""

    freezes: ClassVar[bool] = False
    """True if untrained weights never change: linear layers keep them in the type of the computation."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """A converter's options: `--model_converters.<class name in lower case>.<field>`."""

        def check_run(
            self, *, training: TrainingConfig, parallelism: ParallelismConfig, compile: CompileConfig
        ) -> None:
            """Raise `UserError`, before any process starts, for an option that this converter does not support."""

        def check_device(self) -> None:
            """Raise `UserError`, before any process starts, if this machine's device is unsuitable; not in dry runs."""

    def check_model(self, model: nn.Module) -> None:
        """Raise `UserError`, before any process starts, if a temporary model on the meta device cannot be converted;
        later converters get it as this leaves it."""

    def check_initial_weights(self, spec: ModelSpec, saved: Configurable.Config | None) -> None:
        """Raise `UserError`, before any process starts, if `load_initial_weights` would fail for the plain model
        `spec`; not called if the run starts from a checkpoint of this converter, with the configuration `saved`."""

    def convert(self, model: nn.Module) -> None:
        """Rewrite a model on the meta device, before parallelization. Raise `UserError` if nothing is to convert."""

    def load_initial_weights(self, model_parts: list[nn.Module], spec: ModelSpec) -> None:
        """Load additional initial values from files at the start of a run, after the plain model's weights. A resumed
        run calls this only if the checkpoint lacks frozen weights (`checkpoint.save_trainable_only`)."""

    def post_init_hook(self, model_parts: list[nn.Module]) -> None:
        """Act once before training, after weights are initialized or loaded."""

    def pre_step_hook(self, model_parts: list[nn.Module], step: int) -> None:
        """Act before each step, numbered from 1 over all resumptions. After a step without data, the last number (or 0)
        comes again, so that a final validation computes like that step."""

    def post_optimizer_hook(self, model_parts: list[nn.Module]) -> None:
        """Act after each optimizer step."""

    def write_export_files(
        self, folder: Path, spec: ModelSpec, model: nn.Module, read: Callable[[str], Tensor]
    ) -> None:
        """Write separately useful parts of the conversion into a subfolder of `folder`, the plain model's export, in
        one process. In `model`, on the meta device, `requires_grad` marks trained parameters, if known; `read` returns
        whole tensors by name."""


class LayerConverter(ModelConverter):
    """Replace layers chosen by name patterns, in `convert_layer`; a second converter for the same layer is refused."""

    layer_types: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear,)
    """Layers that can be converted, of exactly these classes."""

    converts_head: ClassVar[bool] = False
    """True if the output head can be converted, although it is never called."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConverter.Config):
        """Selection of layers to convert."""

        include: list[str] = field(default_factory=lambda: [r"."])
        """Regular expressions searched in the layers' names (layers.0.attention.wq); matching layers are converted."""

        exclude: list[str] = field(default_factory=list)
        """Regular expressions; layers with matching names are not converted."""

        def validate(self) -> None:
            option = f"--model_converters.{config_key(self)}"
            check_choice(option, self.include, self.exclude, "nothing would be converted")

    config: Config

    def check_model(self, model: nn.Module) -> None:
        with only_warnings():
            self.convert(model)

    def convert(self, model: nn.Module) -> None:
        """Replace the chosen layers of a model on the meta device, in place, and log them. Raise `UserError` if a
        pattern matches no layer, nothing is left to convert, or a layer is converted already."""
        key, chosen = config_key(self.config), self.select(model)
        for name, layer in chosen.items():
            converted = self.convert_layer(name, layer)
            setattr(converted, _CONVERTED_BY, key)
            model.set_submodule(name, converted, strict=True)
        with_weights = (name for name, module in model.named_modules() if list(module.parameters(recurse=False)))
        remaining = _in_words(name for name in with_weights if name not in chosen) or "none"
        logger.info("%s: %d layers converted: %s; as they were: %s", key, len(chosen), _in_words(chosen), remaining)

    def select(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the layers that the patterns choose, by name. Raise `UserError` like `convert`."""
        config, key = self.config, config_key(self.config)
        layers = {name: module for name, module in model.named_modules() if isinstance(module, self.layer_types)}
        if not self.converts_head:
            layers.pop(_HEAD, None)
        tied = self.converts_head and getattr(model, _HEAD, layers) is None
        kind = f"layers (the head is tied to the embedding, so that there is no '{_HEAD}')" if tied else "layers"
        names = choose(f"--model_converters.{key}", config.include, config.exclude, list(layers), kind)
        for name in names:
            if type(layers[name]) not in self.layer_types:
                other = converter_of(layers[name]) or type(layers[name]).__name__
                raise UserError(
                    f"model_converters: {name} is converted by {other} already, and {key} does not go on top of that; "
                    f"exclude it from one of the two (--model_converters.{key}.exclude)"
                )
        chosen = {name: layers[name] for name in names if self.accepts(name, layers[name])}
        if not chosen:
            raise UserError(f"--model_converters.{key}: nothing to convert is left of the layers {_in_words(layers)}")
        return chosen

    def accepts(self, name: str, layer: nn.Module) -> bool:
        """Return whether to convert a chosen layer. Overrides raise `UserError` if skipping it silently is wrong."""
        return True

    @abstractmethod
    def convert_layer(self, name: str, layer: nn.Module) -> nn.Module:
        """Return the replacement of `layer` on the meta device, with its initializers (`protocols.initializer`)."""


def converter_of(layer: nn.Module) -> str | None:
    """Return the option name of the converter that made `layer`, or None."""
    return getattr(layer, _CONVERTED_BY, None)


@contextlib.contextmanager
def only_warnings() -> Iterator[None]:
    """Suppress log messages below warnings."""
    level = logger.level
    logger.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        logger.setLevel(level)


def _in_words(names: Iterable[str]) -> str:
    return ", ".join(without_numbers(names))
