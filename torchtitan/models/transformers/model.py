"""`TransformersModel`: a class of transformers with the interface of our models."""

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from torchtitan.components.losses.loss import IGNORE_INDEX
from torchtitan.config.configurable import builds
from torchtitan.models.transformers.balance import (
    ClassBalance,
    make_balance,
    records_routers,
    returns_router_loss,
)
from torchtitan.models.transformers.captions import (
    language_side,
    needs_images,
    reads_captions,
    text_alone_refusal,
    with_blank,
)
from torchtitan.models.transformers.context import ClassAttention
from torchtitan.models.transformers.cross_attention import cross_attention_layers
from torchtitan.models.transformers.decoder_cache import DecoderCache, has_decoder_cache
from torchtitan.models.transformers.description import build_class, class_of
from torchtitan.models.transformers.encoder_decoders import is_encoder_decoder, readers_of_text
from torchtitan.models.transformers.experts import (
    even_experts,
    fused_experts,
    matrices_of,
    stack_experts,
)
from torchtitan.models.transformers.flops import forward_flops, with_backward
from torchtitan.models.transformers.generation import ClassCache, NextTokens, has_cache
from torchtitan.models.transformers.head import ClassHead, OutputPlace, output_name
from torchtitan.models.transformers.image_codes import encode_each_image
from torchtitan.models.transformers.image_flops import ImageFlops, trace_images
from torchtitan.models.transformers.image_packing import (
    choose_image_packing,
    gather_with_images,
    implementation_with_images,
    mask_with_images,
    run_with_images,
)
from torchtitan.models.transformers.images import (
    Part,
    feature_owner,
    has_prefixes,
    image_arguments,
    is_language_model,
    join_image_experts,
    parts_of,
    places_of,
    reading_blank,
    reads_latest_image,
    running_vision_once,
    train_parts,
    vision_layers,
    without_images,
)
from torchtitan.models.transformers.initialize import add_initializers, class_values
from torchtitan.models.transformers.layouts import ClassConfig
from torchtitan.models.transformers.output import logit_transform
from torchtitan.models.transformers.packing import ClassOutputs, choose_packing
from torchtitan.models.transformers.scores import reason_against_scores, with_score
from torchtitan.models.transformers.stages import (
    Division,
    StageStates,
    divide,
    keep_stage,
)
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.experts import StackedExperts
from torchtitan.protocols.images import ImageInputs
from torchtitan.protocols.model import AbsentModule, BaseModel
from torchtitan.protocols.output_head import UNCHANGED, Head, compute_logits
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class TransformersModel(BaseModel):
    """A class of transformers, in `model`, without its output weights, which are in `head`: the
    loss reads them."""

    @dataclass(kw_only=True, slots=True)
    class Config(ClassConfig):
        """A config.json, with the sizes of the language model."""

        train: list[Part] = field(default_factory=lambda: ["language"])
        """Parts that are trained, of a model that reads images: language, projector (between the
        two), vision."""

        @builds(lambda: TransformersModel)
        def build(self) -> object:
            """Build the model on the current device."""

        def validate(self) -> None:
            whole = self.transformers_config()
            text = whole.get_text_config(decoder=True)
            if self.reads_images and is_language_model(whole):
                raise UserError(
                    f"config.json: model_type '{whole.model_type}' reads no images; use --config "
                    "sft or lora"
                )
            if self.scores and (reason := reason_against_scores(self.document)):
                raise UserError(f"--module reward: {reason}; train a model of another class")
            if not self.reads_images and self.train != ["language"]:
                raise UserError(
                    f"--model.train {' '.join(self.train)}: this configuration trains on text, "
                    "which reaches the language model only; use --config sft_images or lora_images"
                )
            if not self.train or len(set(self.train)) < len(self.train):
                raise UserError(
                    f"--model.train {' '.join(self.train)}: name at least one part, and each once"
                )
            if getattr(text, "label_smoothing", 0):
                raise UserError(
                    "config.json: label_smoothing is above 0, which the loss here does not have; "
                    "set 0"
                )
            dropped = ["layerdrop"]
            if is_encoder_decoder(whole):
                dropped += ["decoder_layerdrop", "encoder_layerdrop"]
            for name in dropped:
                if getattr(text, name, 0):
                    raise UserError(
                        f"config.json: {name} is above 0, but each rank would drop other layers; "
                        "set 0"
                    )
            if self.dim != text.hidden_size:
                raise UserError(
                    f"--model.dim is {self.dim}, but the hidden_size in config.json is "
                    f"{text.hidden_size}"
                )

        def check_training(self) -> None:
            described = self.transformers_config()
            if not self.reads_images and needs_images(described):
                raise UserError(text_alone_refusal(described))
            if not self.reads_images and has_prefixes(class_of(described)[0], described):
                raise UserError(
                    f"the prompts of model_type '{described.model_type}' see both ways, which "
                    "training on text does not compute; use --config sft_images, whose rows need "
                    "no images"
                )

    config: Config
    splits_sequences = False

    def __init__(self, config: Config):
        super().__init__(config)
        described = config.transformers_config()
        transform = UNCHANGED if config.scores else logit_transform(config.document)
        implementation: str | dict[str, str] | None
        if config.reads_images or needs_images(described):
            self.packing = choose_image_packing(described)
            implementation = implementation_with_images(described, self.packing)
        else:
            self.packing = choose_packing(described)
            implementation = self.packing.implementation
        self._implementation = implementation
        self.model = build_class(described, implementation)
        encode_each_image(self.model)
        # The class's own choice, for a tokenizer of images that is never trained; and statistics of
        # batches, which would depend on packing, ranks and recomputed layers
        self._frozen = [
            module
            for module in self.model.modules()
            if not module.training or isinstance(module, _BATCH_NORMS)
        ]
        _share_modules(self.model)
        add_initializers(self.model)
        train_parts(self.model, config.train)
        if config.scores:
            with_score(self.model)
        self.unused_layers = _frozen_modules(self)
        self.balance = (
            make_balance(self.model, self.auxiliary_weight) if self.has_auxiliary_loss else None
        )
        self.attend = ClassAttention()
        self._prompt_images: dict[str, Tensor] | None = None
        self.division: Division | None = None
        self.stage: StageStates | None = None
        """Hidden states between pipeline stages, if this is one."""
        self._vision_names = [f"model.{name}" for name in vision_layers(self.model)]
        self._block_names = _find_blocks(self.model)
        if config.reads_images:
            join_image_experts(self.model)
            blocks = dict.fromkeys([*self._vision_names, *self._block_names])
            self._block_names = list(blocks)
            if not self._vision_names:
                logger.info(
                    "%s has no list of layers in its vision tower, whose weights are gathered at "
                    "once and whose activations are all kept",
                    type(self.model).__name__,
                )
        self.is_compiled = False
        output, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        self.is_tied = output is not None and output.weight is embedding.weight
        self.output_name = output_name(self.model)
        self.head: ClassHead | None = ClassHead(
            None if self.is_tied or not transform else output, transform or UNCHANGED
        )
        if transform or self.is_tied:
            self.model.set_submodule(
                self.output_name, OutputPlace(self.model, computes=not transform)
            )
        if not transform:
            logger.info(
                "%s transforms its logits itself: the loss gets all of them",
                type(self.model).__name__,
            )

    @property
    def captured(self) -> "OutputPlace | None":
        """The module that replaces the class's output layer; None if the class computes its logits
        itself, and in a pipeline stage without it."""
        if self.head is None:
            return None
        place = self.model.get_submodule(self.output_name)
        return place if isinstance(place, OutputPlace) and not place.computes else None

    @property
    def has_auxiliary_loss(self) -> bool:
        """True if the class returns a loss of its routers."""
        return returns_router_loss(self.model.config)

    @property
    def auxiliary_weight(self) -> float:
        """Weight of the routers' auxiliary loss. Raise `UserError` if the class has none under a
        known name."""
        for owner in (self.model, self.model.config.get_text_config(decoder=True)):
            for name in ("router_aux_loss_coef", "aux_loss_coef"):
                weight = getattr(owner, name, None)
                if isinstance(weight, float | int):
                    return weight
        name = type(self.model).__name__
        raise UserError(
            f"{name} names no weight of its auxiliary loss; set output_router_logits to false"
        )

    @property
    def tok_embeddings(self) -> nn.Module:
        """The token embedding."""
        return cast(nn.Module, self.model.get_input_embeddings())

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all modules but those that the class builds in evaluation mode, and batch
        normalization, which keeps its statistics.

        Raises:
            UserError: see `BaseModel.Config.check_training`.
        """
        if mode:
            self.config.check_training()
        super().train(mode)
        for module in self._frozen:
            module.eval()
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Convert or move parameters and buffers, except the types of buffers: the choice of
        experts depends on one."""
        buffers = dict(self.named_buffers())
        super().to(*args, **kwargs)
        for name, buffer in self.named_buffers():
            path, _, own_name = name.rpartition(".")
            setattr(self.get_submodule(path), own_name, buffers[name].to(buffer.device))
        return self

    def keep_modules(self, names: Collection[str]) -> None:
        if self.division is None:
            self.division = divide(self, self.config.try_stages()[0])
        self.stage = keep_stage(self, self.division, names)
        self._block_names = [
            name
            for name in self._block_names
            if not isinstance(self.get_submodule(name), AbsentModule)
        ]

    def blocks(self) -> dict[str, nn.Module]:
        return {name: self.get_submodule(name) for name in self._block_names}

    def stacked_experts(self) -> list[StackedExperts]:
        return stack_experts(self.model)

    def expert_matrices(self) -> list[tuple[nn.Module, Collection[str]]]:
        layers = [*fused_experts(self.model).values(), *even_experts(self.model)]
        return [(each, matrices_of(each)) for each in layers]

    def units(self) -> list[nn.Module]:
        embedding = [self.model.get_input_embeddings()]
        if self.is_tied or isinstance(embedding[0], AbsentModule):
            embedding = []
        head = [] if self.head is None or self.head.output is None else [self.head]
        blocks = self.blocks().values()
        uses = Counter(parameter for block in blocks for parameter in block.parameters())
        shared = {parameter for parameter, n_uses in uses.items() if n_uses > 1}
        units = [block for block in blocks if shared.isdisjoint(block.parameters())]
        if self.config.reads_images:
            # Other modules may run on some ranks only; their weights belong to the model's unit.
            language = [self.model.get_decoder(), *readers_of_text(self.model)]
            decoder = {module for part in language for module in part.modules()}
            decoder -= set(cross_attention_layers(self.model))
            units = [block for block in units if block in decoder]
            units = [*dict.fromkeys([*self.vision_layers(), *units])]  # GIT's decoder has both
        return [*embedding, *units, *head]

    def vision_layers(self) -> list[nn.Module]:
        """Return the layers of the vision tower, in forward order."""
        return [self.get_submodule(name) for name in self._vision_names]

    def values_of(self, names: Sequence[str], seed: int) -> Iterator[tuple[str, Tensor]]:
        return class_values(self.config, names, seed)

    def generation_cache(self, make_default: Callable[[], object]) -> ClassCache | None:
        if not self._has_cache():
            return None
        kind = DecoderCache if is_encoder_decoder(self.model.config) else ClassCache
        return kind(self._prompt_images)

    def _has_cache(self) -> bool:
        compute = has_decoder_cache if is_encoder_decoder(self.model.config) else has_cache
        return bool(compute(self.config.document, self._implementation))

    @cached_property
    def _places_of_readers(self) -> list[tuple[nn.Module, str]]:
        return places_of(self.model, "vision", "projector")

    def image_readers(self) -> list[nn.Parameter]:
        return [getattr(module, name) for module, name in self._places_of_readers]

    @cached_property
    def _places_of_projector(self) -> list[tuple[nn.Module, str]]:
        return places_of(self.model, "projector")

    def _projector(self) -> list[nn.Parameter]:
        """Return the present parameters of the projector."""
        return [getattr(module, name) for module, name in self._places_of_projector]

    def _reader_dtype(self) -> torch.dtype:
        """Return the type of the present weights outside of the layers of the vision tower."""
        layers = {module for layer in self.vision_layers() for module in layer.modules()}
        places = self._places_of_readers
        outside = [place for place in places if place[0] not in layers] or places
        module, name = outside[0]
        dtype: torch.dtype = getattr(module, name).dtype
        return dtype

    def _reads_blank(self, images: ImageInputs) -> bool:
        return bool(images.blank) and feature_owner(self.model) is not None

    @contextlib.contextmanager
    def _reading_images(self, images: ImageInputs) -> Iterator[None]:
        """Let all ranks run the vision tower in a forward pass if they share its layers or its
        gradients."""
        if reads_captions(self.model.config):  # its class runs it in each pass
            yield
            return
        layers = self.vision_layers()
        is_shared = any(isinstance(layer, FSDPModule) for layer in layers)
        with contextlib.ExitStack() as contexts:
            if is_shared:
                contexts.enter_context(running_vision_once(self.model, layers[0]))
            if not images.tensors and (is_shared or torch.is_grad_enabled()):
                if self._reads_blank(images):
                    blank = reading_blank(self.model, images, self._reader_dtype(), self._projector)
                    contexts.enter_context(blank)
                elif is_shared:
                    raise UserError(
                        "ranks that share a vision tower need batches with images or with a blank "
                        "image, `ImageInputs.blank`, which this data loader does not make"
                    )
            yield

    @contextlib.contextmanager
    def reading(self, images: ImageInputs) -> Iterator[None]:
        """Give `images` to the prompt that is generated from; inside, generate from one prompt at a
        time.

        Raises:
            UserError: if the class has no cache here that keeps images.
        """
        if not self._has_cache():
            name = type(self.model).__name__
            raise UserError(f"{name} cannot generate from images here: its cache is not used")
        dtype = self._reader_dtype()
        self._prompt_images = image_arguments(self.model, images, dtype)
        try:
            yield
        finally:
            self._prompt_images = None

    def flops_per_token(self, seq_len: int) -> float:
        """Return operations per token, forward and backward: see `flops`."""
        with torch.device("meta"):
            whole = build_class(self.config.transformers_config(), "eager").eval()
        plain = language_side(whole)
        assert self.head is not None, "of the whole model"
        forward = forward_flops(plain, seq_len, is_recurrent=self.packing.mode == "rows")
        return with_backward(
            forward, self, [*self.model.get_decoder().modules(), *self.head.modules()]
        )

    @cached_property
    def _flops_of_images(self) -> ImageFlops:
        return ImageFlops(self.config.transformers_config())

    def image_flops(self, images: ImageInputs) -> float:
        return self._flops_of_images.of(self.model, images)

    def trace_images(self, images: ImageInputs) -> None:
        trace_images(self.model, images, self._reader_dtype())

    def forward(
        self,
        tokens_BL: Tensor,
        attention: AttentionMetadata | None = None,
        *,
        head: Head = compute_logits,
        images: ImageInputs | None = None,
        **head_inputs: object,
    ) -> Tensor:
        """Return logits (B, L, V), or the result of `head`; see
        `torchtitan.models.common.decoder.Decoder.forward`. `images` are the images of the
        documents, in the order of the documents.

        The auxiliary loss of routers, if the class returns one, is computed over the global batch
        in the steps of a `LoadBalancer`, which do not show it; elsewhere, a loss includes the
        class's auxiliary loss, weighted with the number of labels."""
        balance = self.balance
        if balance is not None and (balance.totals is None or not self.training):
            balance = None  # no `LoadBalancer` drives this step
        if isinstance(attention, NextTokens):
            outputs, hidden_BLD = self._next_tokens(tokens_BL, attention, images)
        elif images is not None:
            outputs, hidden_BLD = self._with_images(tokens_BL, attention, images, balance)
        else:
            outputs, hidden_BLD = self._text(tokens_BL, attention, balance)
        if self.head is None:  # a stage before the last
            return hidden_BLD
        if self.captured:
            tied = self.captured.shared() if self.is_tied else None
            result = self.head(hidden_BLD, tied, head, **head_inputs)
        else:
            result = head(hidden_BLD, None, **head_inputs)
        labels_BL = head_inputs.get("labels_BL")
        # heads of other methods return log-probabilities, for example, without labels
        if not self.training or not isinstance(labels_BL, Tensor):
            return result
        if result.ndim > 0 or balance is not None:
            return result
        if self.stage is not None and self.has_auxiliary_loss:
            raise UserError(
                "a pipeline stage has the routers' loss of its own layers only; train with a "
                "LoadBalancer, which joins the stages, or set output_router_logits to false"
            )
        auxiliary = getattr(outputs, "aux_loss", None)
        if not isinstance(auxiliary, Tensor):
            return result
        n_labels = (labels_BL != IGNORE_INDEX).sum()
        return result + self.auxiliary_weight * auxiliary * n_labels

    def _next_tokens(
        self, tokens_BL: Tensor, attention: NextTokens, images: ImageInputs | None
    ) -> tuple[ClassOutputs, Tensor]:
        """Return the class's outputs and the hidden states of tokens that follow a cache."""
        inputs = None
        reading: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if images is not None:
            images = with_blank(self.model.config, images)
            reading = self._reading_images(images)
            inputs = image_arguments(self.model, images, self._reader_dtype())
        elif needs_images(self.model.config) and not attention.cache.has_images:
            raise UserError(text_alone_refusal(self.model.config))
        with reading:
            outputs = attention.cache.run(self.model, tokens_BL, attention, inputs)
        return outputs, attention.cache.newest(self._hidden_of(outputs))

    def _with_images(
        self,
        tokens_BL: Tensor,
        attention: AttentionMetadata | None,
        images: ImageInputs,
        balance: ClassBalance | None,
    ) -> tuple[ClassOutputs, Tensor]:
        """Return the class's outputs and the hidden states of documents with images."""
        with self._reading_images(images):
            outputs = run_with_images(
                self.packing,
                self.model,
                tokens_BL,
                attention,
                images,
                self._reader_dtype(),
                **self._packing_options(),
            )
        hidden_BLD = gather_with_images(self.packing, self._hidden_of(outputs), attention)
        is_read = images.tensors or self._reads_blank(images) or reads_latest_image(self.model)
        if not is_read and torch.is_grad_enabled():
            layers = nn.ModuleList(cross_attention_layers(self.model))
            readers = [*self.image_readers(), *layers.parameters()]
            hidden_BLD = without_images(readers, hidden_BLD)
        if balance is not None:
            mask_N = mask_with_images(self.packing, tokens_BL, attention)
            hidden_BLD = balance(hidden_BLD, outputs.router_logits, mask_N)
        return outputs, hidden_BLD

    def _text(
        self,
        tokens_BL: Tensor,
        attention: AttentionMetadata | None,
        balance: ClassBalance | None,
    ) -> tuple[ClassOutputs, Tensor]:
        """Return the class's outputs and the hidden states of documents. A pipeline stage after the
        first gets hidden states instead of tokens."""
        if needs_images(self.model.config) and not self.config.reads_images:
            raise UserError(text_alone_refusal(self.model.config))
        if self.stage is not None and tokens_BL.is_floating_point():
            self.stage.received = self.packing.scatter(tokens_BL, attention)
            tokens_BL = torch.zeros_like(tokens_BL[..., 0], dtype=torch.long)
        # A dry run of a class that needs images traces their parts apart, see `trace_images`.
        outputs = self.packing.run(
            language_side(self.model),
            tokens_BL,
            attention,
            attend=self.attend,
            **self._packing_options(),
        )
        if self.head is None:
            assert self.stage is not None
            states = self.stage.take()
        else:
            states = self._hidden_of(outputs)
        hidden_BLD = self.packing.gather(states, attention)
        if balance is not None:
            mask_N = self.packing.token_mask(tokens_BL, attention)
            logits = getattr(outputs, "router_logits", None)
            hidden_BLD = balance(hidden_BLD, logits, mask_N)
        return outputs, hidden_BLD

    @cached_property
    def _records_routers(self) -> bool:
        return records_routers(self.model)

    def _packing_options(self) -> dict[str, bool]:
        options = {
            "static": self.is_compiled,
            "masks_padding": self.training and self.has_auxiliary_loss,
            "return_dict": True,
        }
        if self.stage is not None and self.has_auxiliary_loss and not self._records_routers:
            options["output_router_logits"] = False  # the class's loss needs at least one layer
        return options

    def _hidden_of(self, outputs: ClassOutputs) -> Tensor:
        """Return the hidden states before the head; the logits of a class that computes them."""
        hidden: Tensor = self.captured.hidden.pop() if self.captured else outputs.logits
        return hidden


def _share_modules(model: "PreTrainedModel") -> None:
    """Share the modules of tied parameters, where only the parameters are the same: they are
    replaced when a model is moved. The output layer is handled separately."""
    output = model.get_output_embeddings()
    for pair in model.all_tied_weights_keys.items():
        alias, original = (name.rpartition(".")[0] for name in pair)
        one, other = model.get_submodule(alias), model.get_submodule(original)
        if one is not output and type(one) is type(other):
            model.set_submodule(alias, other)


def _frozen_modules(model: nn.Module) -> set[str]:
    """Return the names of the modules without trained parameters of their own."""
    own = {name: module.parameters(recurse=False) for name, module in model.named_modules()}
    return {
        name for name, weights in own.items() if not any(weight.requires_grad for weight in weights)
    }


def _find_blocks(model: "PreTrainedModel") -> list[str]:
    """Return the names of the outermost numbered modules that the class declares unsplittable; if
    the decoder has none, also the modules in its largest list."""
    unsplittable, decoder = set(model._no_split_modules or ()), set(model.get_decoder().modules())
    names: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in names)
        if (
            type(module).__name__ in unsplittable
            and name.rpartition(".")[2].isdigit()
            and not is_inside
        ):
            names[name] = module
    vision = {id(weight) for weight in parts_of(model).get("vision", [])}
    lists = [
        part
        for part in model.named_modules()
        if isinstance(part[1], nn.ModuleList)
        and part[1] in decoder
        and not all(id(weight) in vision for weight in part[1].parameters())
    ]
    if lists and decoder.isdisjoint(names.values()):
        largest, blocks = max(
            lists, key=lambda part: sum(parameter.numel() for parameter in part[1].parameters())
        )
        names |= {f"{largest}.{i}": block for i, block in enumerate(blocks)}
    return [f"model.{name}" for name in names]
