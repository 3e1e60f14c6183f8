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
"""The layer whose weights a model hands to its loss, which is why it is never called (`Decoder.output_weight`)."""

_CONVERTED_BY = "converted_by"
"""Attribute of a layer that a converter has made: the converter's name."""


class ModelConverter(Configurable):
    """Rewrites modules in place. Listed in `Trainer.Config.model_converters`, applied in that order.

    Every hook but `check_model` does nothing unless overridden. They are called in this order: `convert`; when the run
    begins, `load_initial_weights`; `post_init_hook`; for every step, `pre_step_hook` and `post_optimizer_hook`.
    """

    changes_weights: ClassVar[bool] = False
    """Whether the converted model's tensors differ from the plain model's (`ConvertedModule`): checkpoints then name
    the converters, so that the plain model can be made of them."""

    simulates: ClassVar[bool] = False
    """Whether the run computes as its model will once `torchtitan convert` has quantized it: checkpoints say how."""

    run_options: ClassVar[frozenset[str]] = frozenset()
    """Fields of its Config that a run may change and go on with the same weights: how these are trained, what they
    begin as, or what their names and shapes show. All others say what the weights mean."""

    freezes: ClassVar[bool] = False
    """Whether weights that it leaves untrained never change: linear layers keep them in the type that they are computed
    in."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """A converter's options: `--model_converters.<class name in lower case>.<field>`."""

        def check_run(
            self, *, training: TrainingConfig, parallelism: ParallelismConfig, compile: CompileConfig
        ) -> None:
            """Raise `UserError`, before any process starts, for an option that this converter does not go with."""

        def check_device(self) -> None:
            """Raise `UserError`, before any process starts, if this machine's device cannot compute the result; not
            called in a dry run, which computes nothing."""

    def check_model(self, model: nn.Module) -> None:
        """Convert a model on the meta device that is thrown away, before any process starts, without a log line."""
        with only_warnings():
            self.convert(model)

    def check_initial_weights(self, spec: ModelSpec, given: Configurable.Config | None) -> None:
        """Raise `UserError`, before any process starts, for what `load_initial_weights` could not load for the plain
        model `spec`. If the run begins with a checkpoint of a model that this converter has changed, `given` is its
        configuration there, and `load_initial_weights` is not called."""

    def convert(self, model: nn.Module) -> None:
        """Rewrite a model on the meta device, once, before any parallelization; raise `UserError` if it has nothing
        that could be converted as the configuration says."""

    def load_initial_weights(self, model_parts: list[nn.Module], spec: ModelSpec) -> None:
        """Load what else begins with values from a file, when the run begins and the plain model has its weights. A
        resumed run calls it only if the checkpoint lacks frozen weights (`checkpoint.trained_only`)."""

    def post_init_hook(self, model_parts: list[nn.Module]) -> None:
        """Called once before training, when weights have been initialized or loaded."""

    def pre_step_hook(self, model_parts: list[nn.Module], step: int) -> None:
        """Called before each training step with its number, from 1; a resumed run goes on counting. After a step that
        finds no data it is called with the last one's number (or 0), so that a last validation computes as that
        step."""

    def post_optimizer_hook(self, model_parts: list[nn.Module]) -> None:
        """Called after each optimizer step."""

    def write_beside_export(
        self, folder: Path, spec: ModelSpec, model: nn.Module, read: Callable[[str], Tensor]
    ) -> None:
        """Write what of the conversion is of use by itself into a folder inside `folder`, the plain model's exported
        one; called in one process. `model` is the converted one, on the meta device, `requires_grad` saying which
        parameters were trained, if known; `read` gives a tensor of it by name, whole."""


class LayerConverter(ModelConverter):
    """Replaces layers, chosen by patterns in their names; a subclass says in `convert_layer` by what.

    A layer is converted once: of two converters that choose the same one, the second is refused by name.
    """

    layer_types: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear,)
    """The layers that can be converted, of exactly these classes."""

    converts_head: ClassVar[bool] = False
    """Whether the output head can be converted too, although it is never called."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConverter.Config):
        """Which layers are converted."""

        include: list[str] = field(default_factory=lambda: [r"."])
        """Regular expressions, each searched in the layers' names (layers.0.attention.wq): what they find is
        converted."""

        exclude: list[str] = field(default_factory=list)
        """Regular expressions: layers whose names they find are not converted."""

        def validate(self) -> None:
            """Raise `UserError` for what is no regular expression, and if nothing is included."""
            option = f"--model_converters.{config_key(self)}"
            check_choice(option, self.include, self.exclude, "nothing would be converted")

    config: Config

    def convert(self, model: nn.Module) -> None:
        """Replace the chosen layers of a model on the meta device, in place, and log which they are; raise `UserError`
        if a pattern finds no layer, nothing is left to convert, or another converter has been here."""
        key, chosen = config_key(self.config), self.select(model)
        for name, layer in chosen.items():
            converted = self.convert_layer(name, layer)
            setattr(converted, _CONVERTED_BY, key)
            model.set_submodule(name, converted, strict=True)
        with_weights = (name for name, module in model.named_modules() if list(module.parameters(recurse=False)))
        remaining = _in_words(name for name in with_weights if name not in chosen) or "none"
        logger.info("%s: %d layers converted: %s; as they were: %s", key, len(chosen), _in_words(chosen), remaining)

    def select(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the layers that the patterns choose, by name; raise `UserError` as `convert`."""
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
        """Whether a layer that the patterns choose is converted. An override raises `UserError` for one that cannot be
        converted and should not be passed over in silence."""
        return True

    @abstractmethod
    def convert_layer(self, name: str, layer: nn.Module) -> nn.Module:
        """Return what takes the place of `layer`: on the meta device, and with the initial distributions of its
        parameters (`torchtitan.protocols.initializer`)."""


def converter_of(layer: nn.Module) -> str | None:
    """The name of the converter that has made `layer`, as in its options; None: none has."""
    return getattr(layer, _CONVERTED_BY, None)


@contextlib.contextmanager
def only_warnings() -> Iterator[None]:
    """Log nothing below a warning within."""
    level = logger.level
    logger.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        logger.setLevel(level)


def _in_words(names: Iterable[str]) -> str:
    return ", ".join(without_numbers(names))
