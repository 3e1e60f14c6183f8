"""`ModelConverter`, which rewrites a model's modules, and `LayerConverter`, which replaces layers
by name."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

from torch import Tensor, nn

from torchtitan.config import CompileConfig, Configurable, ParallelismConfig, TrainingConfig
from torchtitan.config.configurable import builds, config_key
from torchtitan.protocols.experts import LinearRouter, StackedExperts
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger, without_logs
from torchtitan.tools.patterns import check_choice, choose, without_numbers

HEAD = "head.output"
"""Output weights, whose layer is never called, since the loss reads them (`OutputHead`)."""

_CONVERTED_BY = "converted_by"

_HUGGING_FACE_NAMES = {
    "attention": "self_attn",
    "wq": "q_proj",
    "wk": "k_proj",
    "wv": "v_proj",
    "wo": "o_proj",
    "feed_forward": "mlp",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
    "tok_embeddings": "embed_tokens",
}
"""Part of a layer's name → what transformers calls it in most families."""


class ModelConverter(Configurable):
    """Rewrite modules in place, in the order of `Trainer.Config.model_converters`. Hooks, in order:
    `convert`; at the start of the run, `load_initial_weights` and `post_init_hook`; at every step,
    `pre_step_hook`, `post_optimizer_hook` and `refresh_hook`. They do nothing unless
    overridden."""

    changes_weights: ClassVar[bool] = False
    """True if tensors differ from the plain model's (`ConvertedModule`): checkpoints then name the
    converters."""

    simulates: ClassVar[bool] = False
    """True if the run simulates quantization by `torchtitan convert`: checkpoints then record the
    options."""

    run_options: ClassVar[frozenset[str]] = frozenset()
    """Config fields that may change when a run resumes: settings of training and initial values,
    and values that tensor names and shapes reveal. All others determine the meaning of the
    weights."""

    moves_weights: ClassVar[bool] = False
    """True if `post_optimizer_hook` changes trained weights."""

    freezes: ClassVar[bool] = False
    """True if some weights are frozen: linear layers store them in the compute dtype."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """A converter's options: `--model_converters.<class name in lower case>.<field>`."""

        _owner: ClassVar[type["ModelConverter"]]

        @builds(lambda: ModelConverter)
        def build(self) -> object:
            """Build the converter."""

        @property
        def option(self) -> str:
            """Common prefix of these option names, for messages."""
            return f"--model_converters.{config_key(self)}"

        def with_weights(self, spec: ModelSpec, path: str, added: range) -> Self:
            """Return a copy with what the weights decide that the run starts from.

            Args:
                spec: the plain model, with its vocabulary size set.
                path: `--checkpoint.initial_load_path`.
                added: ids of tokens added to the tokenizer.
            """
            return self

        def check_run(
            self,
            *,
            training: TrainingConfig,
            parallelism: ParallelismConfig,
            compile: CompileConfig,
        ) -> None:
            """Raise `UserError`, before any process starts, for an option that this converter does
            not support."""

        def check_device(self) -> None:
            """Raise `UserError`, before any process starts, if this device is unsupported; not
            called in dry runs."""

    def check_model(self, model: nn.Module) -> None:
        """Raise `UserError`, before any process starts, if a temporary model on the meta device
        cannot be converted. Changes made here are visible to later converters."""

    def check_initial_weights(self, spec: ModelSpec, saved: Configurable.Config | None) -> None:
        """Raise `UserError`, before any process starts, if `load_initial_weights` would fail for
        the plain model `spec`; not called if the run starts from a checkpoint of this converter,
        with the configuration `saved`."""

    def convert(self, model: nn.Module) -> None:
        """Rewrite a model on the meta device, before parallelization. Raise `UserError` if there is
        nothing to do."""

    def load_initial_weights(self, model_parts: list[nn.Module], spec: ModelSpec) -> None:
        """Load additional initial values from files at the start of a run, after the plain model's
        weights. A resumed run calls this only if the checkpoint omits frozen weights
        (`checkpoint.save_trainable_only`)."""

    def post_init_hook(self, model_parts: list[nn.Module]) -> None:
        """Act once before training, after weights are initialized or loaded."""

    def pre_step_hook(self, model_parts: list[nn.Module], step: int) -> None:
        """Act before each step, counted from 1 over all resumptions. If a step finds no data, this
        is called again with the previous number (or 0), so that the final validation computes as in
        that step."""

    def post_optimizer_hook(self, model_parts: list[nn.Module]) -> None:
        """Act after each optimizer step. A training step may take several of them, or none."""

    def refresh_hook(self, model_parts: list[nn.Module]) -> None:
        """Refresh state derived from the weights: after each optimizer step, and whenever other
        weights replace them, such as averages or the weights of a checkpoint."""

    def write_export_files(
        self, folder: Path, spec: ModelSpec, model: nn.Module, read: Callable[[str], Tensor]
    ) -> None:
        """Write parts that are useful on their own, such as an adapter, into a subfolder of
        `folder`, the export of the plain model. Called in one process. `model` is on the meta
        device, and `requires_grad` marks its trained parameters, if known; `read` returns whole
        tensors by name."""


class LayerConverter(ModelConverter):
    """Replace layers selected by name patterns, in `convert_layer`. A layer cannot be converted
    twice, except those of `converted_types`."""

    layer_types: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear,)
    """Classes of layers that can be converted, excluding subclasses."""

    converted_types: ClassVar[tuple[type[nn.Module], ...]] = ()
    """Classes of layers of other converters that can be converted again."""

    converts_head: ClassVar[bool] = False
    """True if the output head can be converted, although it is never called."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConverter.Config):
        """Selection of layers to convert."""

        include: list[str] = field(default_factory=lambda: [r"."])
        """Regular expressions searched in the layers' names (layers.0.attention.wq, or as in
        transformers layers.0.self_attn.q_proj); matching layers are converted."""

        exclude: list[str] = field(default_factory=list)
        """Regular expressions; layers with matching names are not converted."""

        @builds(lambda: LayerConverter)
        def build(self) -> object:
            """Build the converter."""

        def validate(self) -> None:
            check_choice(self.option, self.include, self.exclude, "nothing would be converted")

    config: Config

    def check_model(self, model: nn.Module) -> None:
        with without_logs(logging.INFO):
            self.convert(model)

    def convert(self, model: nn.Module) -> None:
        """Replace the selected layers of a model on the meta device, in place, and log them. Raise
        `UserError` if a pattern matches no layer, no layer is selected, or a layer is already
        converted."""
        key, selected = config_key(self.config), self.select(model)
        for name, layer in selected.items():
            converted = self.convert_layer(name, layer)
            mark_converted(converted, self.config)
            model.set_submodule(name, converted, strict=True)
        with_weights = (
            name for name, module in model.named_modules() if list(module.parameters(recurse=False))
        )
        unchanged = _join(name for name in with_weights if name not in selected) or "none"
        logger.info(
            "%s: %d layers converted: %s; unchanged: %s",
            key,
            len(selected),
            _join(selected),
            unchanged,
        )

    def select(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the layers selected by the patterns, by name; log those skipped. Raise `UserError`
        like `convert`."""
        config, key = self.config, config_key(self.config)
        unused = getattr(model, "unused_layers", ())
        named = ((name, module) for name, module in model.named_modules() if name not in unused)
        layers = {name: module for name, module in named if isinstance(module, self.layer_types)}
        if not self.converts_head:
            layers.pop(HEAD, None)
        is_tied = self.converts_head and is_head_tied(model)
        kind = (
            f"layers (the head is tied to the embedding, so there is no '{HEAD}')"
            if is_tied
            else "layers"
        )
        names = choose(
            config.option, config.include, config.exclude, list(layers), kind, hugging_face_name
        )
        for name in names:
            if type(layers[name]) in self.converted_types:
                continue
            check_unconverted(
                name,
                layers[name],
                f"{key} cannot convert it again",
                advice=f"exclude it from one of them ({config.option}.exclude)",
            )
            is_of_base = isinstance(layers[name], (StackedExperts, LinearRouter))
            if type(layers[name]) not in self.layer_types and not is_of_base:
                base = next(type_ for type_ in self.layer_types if isinstance(layers[name], type_))
                raise UserError(
                    f"{config.option}: {name} cannot be converted: it is a "
                    f"{type(layers[name]).__name__}, which computes otherwise than "
                    f"{base.__name__}; exclude it ({config.option}.exclude)"
                )
        reasons = {name: self.reason_to_skip(name, layers[name]) for name in names}
        groups: dict[str, list[str]] = {}
        for name, reason in reasons.items():
            if reason:
                groups.setdefault(reason, []).append(name)
        skipped = "; ".join(f"{reason}: {_join(of_reason)}" for reason, of_reason in groups.items())
        if all(reasons.values()):
            what = skipped or _join(layers)
            raise UserError(
                f"{config.option}: no layer is left to convert: {what}; change "
                f"{config.option}.include"
            )
        if skipped:
            logger.info("%s: skipped layers with %s", key, skipped)
        return {name: layers[name] for name in names if not reasons[name]}

    def reason_to_skip(self, name: str, layer: nn.Module) -> str:
        """Return what keeps a selected layer from being converted, "" for nothing. Raise
        `UserError` for a layer that should not be skipped."""
        return ""

    @abstractmethod
    def convert_layer(self, name: str, layer: nn.Module) -> nn.Module:
        """Return the replacement of `layer` on the meta device, with its initializers
        (`protocols.initializer`)."""


def hugging_face_name(name: str) -> str:
    """Return what transformers calls a layer in most families, without the prefix of the model:
    layers.0.attention.wq is layers.0.self_attn.q_proj."""
    if name == HEAD:
        return "lm_head"
    return ".".join(_HUGGING_FACE_NAMES.get(part, part) for part in name.split("."))


def is_head_tied(model: nn.Module) -> bool:
    """Return whether a model's output weights are its embedding."""
    head = getattr(model, "head", model)
    return getattr(head, "output", head) is None


def mark_converted(layer: nn.Module, config: Configurable.Config) -> None:
    """Record the converter that created `layer`."""
    setattr(layer, _CONVERTED_BY, config_key(config))


def check_unconverted(name: str, layer: nn.Module, reason: str, *, advice: str = "") -> None:
    """Raise `UserError` with `reason` if another converter has converted the layer `name`."""
    if other := converter_of(layer):
        advice = advice or f"exclude it from that (--model_converters.{other}.exclude)"
        raise UserError(
            f"model_converters: {name} is already converted by {other}, and {reason}; {advice}"
        )


def converter_of(layer: nn.Module) -> str | None:
    """Return the option name of the converter that created `layer`, or None."""
    return getattr(layer, _CONVERTED_BY, None)


def _join(names: Iterable[str]) -> str:
    return ", ".join(without_numbers(names))
