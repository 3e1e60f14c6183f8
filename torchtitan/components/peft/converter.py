"""`LoRA` and `QLoRA`: converters that add adapters to a model and freeze everything else."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

import tyro
from torch import Tensor, nn

from torchtitan.components.optim.optimizer import trained_names
from torchtitan.components.peft.adapter_files import AdapterSource, read_adapter, write_adapter
from torchtitan.components.peft.experts import adapt_experts
from torchtitan.components.peft.kept import (
    check_form,
    find_forms,
    forms_of,
    is_huggingface_folder,
    saved_forms,
)
from torchtitan.components.peft.lora import (
    AdaptedLayer,
    LoRAEmbedding,
    LoRALinear,
    NarrowLoRALinear,
    QLoRALinear,
)
from torchtitan.components.peft.routers import adapt_router
from torchtitan.components.peft.sizes import Size, is_match, look_up
from torchtitan.components.quantization import nf4
from torchtitan.components.quantization.narrow_products import NarrowLinear
from torchtitan.components.quantization.packed_layers import PackedLinear, pack_experts
from torchtitan.components.weights.few_bits import FewBits
from torchtitan.config.configurable import Configurable
from torchtitan.distributed.compile import check_c_compiler
from torchtitan.distributed.process_group import gather_objects
from torchtitan.protocols.conversion import converted_model
from torchtitan.protocols.converter import (
    HEAD,
    LayerConverter,
    check_unconverted,
    is_head_tied,
    mark_converted,
)
from torchtitan.protocols.experts import LinearRouter, StackedExperts
from torchtitan.protocols.model import BaseModel, ConvertedModule
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.errors import UserError, require, summarize_names
from torchtitan.tools.logging import logger
from torchtitan.tools.patterns import without_numbers

_MAX_RANK = 2**24

EXPORTED = "adapter"
"""Subfolder of an exported model that contains the adapter in PEFT format."""


_POSITIONS = "relative_attention_bias"
"""Name of a table of relative positions in T5 and models after it: one value for each head."""


class LoRA(LayerConverter):
    """Low-rank adapters on linear layers and, if included, on the embedding, routed experts and
    routers."""

    changes_weights: ClassVar[bool] = True
    freezes: ClassVar[bool] = True
    converted_types: ClassVar[tuple[type[nn.Module], ...]] = (NarrowLinear,)
    converts_head: ClassVar[bool] = True
    run_options: ClassVar[frozenset[str]] = frozenset(
        {"include", "exclude", "dropout", "adapter_path", "base_path"}
    )
    layer_types: ClassVar[tuple[type[nn.Module], ...]] = (
        nn.Linear,
        nn.Embedding,
        StackedExperts,
        LinearRouter,
    )

    @dataclass(kw_only=True, slots=True)
    class Config(LayerConverter.Config):
        """Size and location of adapters."""

        include: list[str] = field(
            default_factory=lambda: [r"\.\d+\.(?!.*\bexperts$|moe\.router$)"]
        )
        """Regular expressions searched in the layers' names (layers.0.attention.wq,
        layers.0.moe.experts, layers.0.moe.router, head.output, tok_embeddings), or as in
        transformers (q_proj, lm_head); matching layers get an adapter, routers only if a pattern
        has the word `router`. Default: all linear layers inside the blocks."""

        rank: int = 16
        """Rank of the adapters, at most the smaller dimension of every adapted layer."""

        alpha: float = 32.0
        """Adapter outputs are scaled by alpha / rank."""

        rank_pattern: list[str] = field(default_factory=list)
        """Ranks of some layers, as NAME=RANK: a regular expression of the last parts of the layers'
        names, and of an expert's matrices (attention.wq=8, experts.w13=32). The first match counts;
        others have `rank`."""

        alpha_pattern: list[str] = field(default_factory=list)
        """Values of alpha of some layers, as NAME=ALPHA, in the same way (attention.wq=16)."""

        rslora: bool = False
        """Scale by alpha / sqrt(rank) instead, so that large ranks learn as fast (rsLoRA)."""

        dropout: float = 0.0
        """Dropout probability of the adapters' inputs."""

        dora: bool = False
        """Train the magnitude of each row of the weights separately from its direction (DoRA)."""

        adapter_path: str = ""
        """Folder with a PEFT adapter (adapter_model.safetensors, adapter_config.json) or one of
        torchtune (adapter_model.pt) to start from, with the same layers, rank, alpha and kind.
        Empty: a new adapter, which has no effect initially."""

        base_path: Annotated[str, tyro.conf.Fixed] = ""
        """Set by the run: folder of the base weights, which adapter_config.json names. Empty: they
        are in no Hugging Face folder."""

        def with_weights(self, spec: ModelSpec, path: str, added: range) -> Self:
            base = str(Path(path).resolve()) if is_huggingface_folder(path) else ""
            return dataclasses.replace(self, base_path=base)

        @property
        def base_in_peft(self) -> str | None:
            """Name of the base in PEFT's adapter_config.json; None: unknown."""
            return self.base_path or None

        def size_of(self, name: str) -> Size:
            """Return the adapter size for a layer or an expert's matrix."""
            rank = look_up(self.patterns("rank_pattern"), name, self.rank)
            return Size(int(rank), look_up(self.patterns("alpha_pattern"), name, self.alpha))

        def patterns(self, option: str) -> dict[str, float]:
            """Return the values of `rank_pattern` or `alpha_pattern`. Raise `UserError` for other
            forms."""
            name = f"{self.option}.{option}"
            entries = {"rank_pattern": self.rank_pattern, "alpha_pattern": self.alpha_pattern}
            patterns: dict[str, float] = {}
            for entry in entries[option]:
                pattern, _, text = entry.rpartition("=")
                if not pattern or pattern in patterns:
                    raise UserError(
                        f"{name}: {entry!r} must be NAME=NUMBER, such as attention.wq=8, with a "
                        "new NAME"
                    )
                try:
                    re.compile(pattern)
                    patterns[pattern] = int(text) if option == "rank_pattern" else float(text)
                except re.error as error:
                    raise UserError(
                        f"{name}: {pattern!r} is not a regular expression: {error}"
                    ) from None
                except ValueError:
                    raise UserError(f"{name}: {text!r} in {entry!r} is not a number") from None
            return patterns

        def validate(self) -> None:
            LayerConverter.Config.validate(self)
            option = self.option
            require(
                1 <= self.rank <= _MAX_RANK, f"{option}.rank", self.rank, f"from 1 to {_MAX_RANK}"
            )
            require(0 < self.alpha < math.inf, f"{option}.alpha", self.alpha, "a number above 0")
            for pattern, rank in self.patterns("rank_pattern").items():
                name = f"{option}.rank_pattern {pattern}"
                require(1 <= rank <= _MAX_RANK, name, rank, f"from 1 to {_MAX_RANK}")
            for pattern, alpha in self.patterns("alpha_pattern").items():
                require(
                    0 < alpha < math.inf,
                    f"{option}.alpha_pattern {pattern}",
                    alpha,
                    "a number above 0",
                )
            require(0 <= self.dropout < 1, f"{option}.dropout", self.dropout, "in [0, 1)")

    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        self._trained: set[str] = set()

    def convert(self, model: nn.Module) -> None:
        super().convert(model)
        for module in model.modules():  # also norms and embeddings
            trained = module.adapter if isinstance(module, AdaptedLayer) else ()
            for name, parameter in module.named_parameters(recurse=False):
                if name not in trained:
                    parameter.requires_grad_(False)

    def select(self, model: nn.Module) -> dict[str, nn.Module]:
        selected = super().select(model)
        is_tied = is_head_tied(model)
        for name, layer in selected.items():
            if is_tied and isinstance(layer, nn.Embedding):
                raise self._layer_error(
                    name, "it shares its weights with the output head (--model.tie_embeddings)"
                )
        self._check_patterns(
            [adapted for name, layer in selected.items() for adapted in matrices_of(name, layer)]
        )
        return selected

    def _check_patterns(self, names: list[str]) -> None:
        """Raise `UserError` for a pattern that matches none of the adapted layers."""
        for option in ("rank_pattern", "alpha_pattern"):
            for pattern in self.config.patterns(option):
                if not any(is_match(pattern, name) for name in names):
                    raise UserError(
                        f"{self.config.option}.{option}: {pattern!r} matches the end of no adapted "
                        f"layer's name: {summarize_names(sorted(names))}"
                    )

    def reason_to_skip(self, name: str, layer: nn.Module) -> str:
        config = self.config
        assert isinstance(layer, self.layer_types)
        if self._is_unnamed_router(layer):
            return "routers that no pattern names by the word router"
        if name.endswith(_POSITIONS) and not any(_POSITIONS in one for one in config.include):
            return f"relative positions that no pattern names {_POSITIONS}"
        for matrix, weight in matrices_of(name, layer).items():
            # For stacked experts: one expert's weights, as a matrix.
            shape = tuple(
                weight.flatten(1, -2).shape[1:]
                if isinstance(layer, StackedExperts)
                else weight.shape
            )
            rank = config.size_of(matrix).rank
            if rank > min(shape):
                reason = f"rank {rank} is larger than the smaller dimension of its weights, {shape}"
                raise self._layer_error(
                    name, reason, advice=f"set rank to at most {min(shape)}, or "
                )
        if config.dora and isinstance(layer, nn.Embedding):
            raise self._layer_error(name, "DoRA supports only linear layers")
        if config.dropout and not isinstance(layer, (nn.Linear, LinearRouter)):
            raise self._layer_error(name, f"dropout {config.dropout} supports only linear layers")
        if config.dropout and name == HEAD:
            reason = (
                f"dropout {config.dropout} cannot apply to the head's inputs, since the loss reads "
                "its weights"
            )
            raise self._layer_error(name, reason)
        return ""

    def _is_unnamed_router(self, layer: nn.Module) -> bool:
        return isinstance(layer, LinearRouter) and not any(
            "router" in pattern for pattern in self.config.include
        )

    def _layer_error(self, name: str, reason: str, *, advice: str = "") -> UserError:
        option = self.config.option
        return UserError(
            f"{option}: {name} cannot have an adapter: {reason}; {advice}exclude it "
            f"({option}.exclude)"
        )

    def convert_layer(self, name: str, layer: nn.Module) -> nn.Module:
        config = self.config
        if isinstance(layer, StackedExperts):
            sizes = {matrix: config.size_of(f"{name}.{matrix}") for matrix in layer.matrices}
            ranks = {matrix: size.rank for matrix, size in sizes.items()}
            scalings = {matrix: size.scaling(config.rslora) for matrix, size in sizes.items()}
            return adapt_experts(
                layer,
                ranks=ranks,
                scalings=scalings,
                dora=config.dora,
                forms=self.expert_forms(name, layer),
            )
        size = config.size_of(name)
        scaling = size.scaling(config.rslora)
        if isinstance(layer, LinearRouter):
            return adapt_router(
                layer, rank=size.rank, scaling=scaling, dropout=config.dropout, dora=config.dora
            )
        if isinstance(layer, nn.Embedding):
            return LoRAEmbedding(layer, rank=size.rank, scaling=scaling)
        assert isinstance(layer, nn.Linear)
        kind = NarrowLoRALinear if isinstance(layer, NarrowLinear) else LoRALinear
        return kind(
            layer, rank=size.rank, scaling=scaling, dropout=config.dropout, dora=config.dora
        )

    def expert_forms(self, name: str, layer: StackedExperts) -> Mapping[str, FewBits]:
        """Return the form of each expert matrix that stays in few bits."""
        return {}

    def check_initial_weights(self, spec: ModelSpec, saved: Configurable.Config | None) -> None:
        path = self.config.adapter_path
        if path and saved is None:
            AdapterSource(Path(path), self.config, converted_model(spec.model, [self]), spec)
            return
        assert saved is None or isinstance(saved, LoRA.Config)
        if path and saved and Path(path).resolve() != Path(saved.adapter_path).resolve():
            raise UserError(
                f"{self.config.option}.adapter_path {path}: --checkpoint.initial_load_path "
                "already has adapters; set only one of the two options"
            )

    def load_initial_weights(self, model_parts: list[nn.Module], spec: ModelSpec) -> None:
        if self.config.adapter_path:
            model = converted_model(spec.model, [self])
            read_adapter(Path(self.config.adapter_path), self.config, model, spec, model_parts)

    def post_init_hook(self, model_parts: list[nn.Module]) -> None:
        """Record the names of all trained parameters, including those outside this adapter."""
        self._trained.update(
            *gather_objects([name for part in model_parts for name in trained_names(part)])
        )

    def write_export_files(
        self, folder: Path, spec: ModelSpec, model: nn.Module, read: Callable[[str], Tensor]
    ) -> None:
        """Write the adapter in PEFT format into `adapter`; log a warning if other parameters were
        trained too."""
        adapted = converted_model(spec.model, [self])
        try:
            check_complete(adapted, self._trained.union(trained_names(model)))
            write_adapter(folder / EXPORTED, self.config, adapted, spec, read)
        except UserError as error:
            logger.warning("%s is exported without a separate adapter: %s", folder, error)


class QLoRA(LoRA):
    """Low-rank adapters on a frozen base in few bits: as it was published, or in NF4. Adapted
    embeddings keep their precision."""

    converted_types = ()
    run_options = LoRA.run_options | {"dequantized"}

    @dataclass(kw_only=True, slots=True)
    class Config(LoRA.Config):
        """Size and location of adapters, and the bits of the base."""

        base: Literal["keep", "nf4"] = "keep"
        """Frozen weights. keep: the linear layers and routed experts that the folder of
        --checkpoint.initial_load_path holds in few bits, adapted or not, stay in them, with exactly
        its values, and its other weights stay wide; adapted linear layers of a folder without few
        bits become NF4. nf4: adapted linear layers and all routed experts become NF4, also those
        dequantized from other bits, which rounds them again. To dequantize instead, use LoRA."""

        forms: Annotated[list[str], tyro.conf.Fixed] = field(default_factory=list)
        """Set by the run: layers that the folder holds in few bits, as NAME=FORM."""

        dequantized: Annotated[list[str], tyro.conf.Fixed] = field(default_factory=list)
        """Set by the run: other weights that the folder holds in few bits."""

        def validate(self) -> None:
            LoRA.Config.validate(self)
            for entry in self.forms:
                check_form(entry)

        def with_weights(self, spec: ModelSpec, path: str, added: range) -> Self:
            named = LoRA.Config.with_weights(self, spec, path, added)
            if self.base != "keep":
                return dataclasses.replace(named, forms=[], dequantized=[])
            saved = saved_forms(path, spec, added, self)
            found = find_forms(path, spec, added, self.option)
            return dataclasses.replace(
                named, forms=saved or found.forms, dequantized=found.dequantized
            )

        def check_device(self) -> None:
            check_c_compiler("--model_converters.qlora unpacks weights in compiled code, which")

    config: Config

    def convert(self, model: nn.Module) -> None:
        super().convert(model)
        keeps = self.config.forms or self.config.base == "nf4"
        kept = self._keep_others(model) if keeps else []
        if self.config.dequantized:
            names = ", ".join(self.config.dequantized)
            logger.info("qlora: dequantized, not kept in few bits: %s", names)
        if kept:
            logger.info(
                "qlora: kept in few bits without adapters: %s", ", ".join(without_numbers(kept))
            )

    def _keep_others(self, model: nn.Module) -> list[str]:
        """Keep layers without adapters in few bits too: published ones, or experts in NF4. Return
        their names. Raise `UserError` for a layer that another converter has converted."""
        kept, wide = list[str](), list[str]()
        if isinstance(model, BaseModel):
            model.stacked_experts()  # a class of transformers stacks them when asked for them
        for name, layer in list(model.named_modules()):
            if isinstance(layer, ConvertedModule):
                continue
            forms = self._forms(name, layer)
            if isinstance(layer, StackedExperts):
                if forms:
                    check_unconverted(name, layer, f"{self.config.option} keeps it in few bits")
                    pack_experts(layer, forms)
                    mark_converted(layer, self.config)
                    kept.append(name)
                wide += [f"{name}.{matrix}" for matrix in layer.matrices if matrix not in forms]
            elif isinstance(layer, nn.Linear) and forms and self.config.forms:
                layer.requires_grad_(False)
                model.set_submodule(name, PackedLinear(layer, forms["weight"]), strict=True)
                kept.append(name)
        if wide and self.config.base == "nf4":
            logger.info(
                "qlora: not in NF4, which needs a multiple of %d inputs: %s",
                *(nf4.BLOCK_SIZE, ", ".join(without_numbers(wide))),
            )
        return kept

    def _forms(self, name: str, layer: nn.Module) -> dict[str, FewBits]:
        """Return the forms of a layer's parameters, by name; none for parameters to keep wide."""
        entries = self.config.forms
        if isinstance(layer, StackedExperts):
            found = {matrix: self._expert_form(name, layer, matrix) for matrix in layer.matrices}
            return {matrix: form for matrix, form in found.items() if form}
        if type(layer) is not nn.Linear:
            return {}
        form = forms_of(entries, name) if entries else nf4.FORM
        return {"weight": form} if form else {}

    def _expert_form(self, name: str, layer: StackedExperts, matrix: str) -> FewBits | None:
        """Return the form of a matrix of experts; None: it stays wide."""
        if self.config.base != "nf4":
            return forms_of(self.config.forms, f"{name}.{matrix}")
        n_inputs = layer.get_parameter(matrix).shape[-2 if layer.is_transposed else -1]
        return None if n_inputs % nf4.BLOCK_SIZE else nf4.FORM

    def convert_layer(self, name: str, layer: nn.Module) -> nn.Module:
        forms = self._forms(name, layer)
        if not forms or isinstance(layer, StackedExperts):
            return super().convert_layer(name, layer)
        assert isinstance(layer, nn.Linear)
        config, size = self.config, self.config.size_of(name)
        return QLoRALinear(
            layer,
            form=forms["weight"],
            rank=size.rank,
            scaling=size.scaling(config.rslora),
            dropout=config.dropout,
            dora=config.dora,
        )

    def expert_forms(self, name: str, layer: StackedExperts) -> dict[str, FewBits]:
        return self._forms(name, layer)

    def reason_to_skip(self, name: str, layer: nn.Module) -> str:
        if self.config.forms:
            return super().reason_to_skip(name, layer)
        if isinstance(layer, StackedExperts):
            return self._reason_to_skip_experts(name, layer)
        if isinstance(layer, LinearRouter) and not self._is_unnamed_router(layer):
            raise self._layer_error(name, "routers are not quantized; LoRA adapts them")
        if isinstance(layer, nn.Linear) and layer.in_features % nf4.BLOCK_SIZE:
            reason = f"NF4 needs a multiple of {nf4.BLOCK_SIZE} inputs, not {layer.in_features}"
            raise self._layer_error(name, reason)
        return super().reason_to_skip(name, layer)

    def _reason_to_skip_experts(self, name: str, layer: StackedExperts) -> str:
        if self.config.base != "nf4":
            reason = "routed experts stay in few bits only if published so; LoRA adapts them"
            advice = f"set {self.config.option}.base nf4, or "
            raise self._layer_error(name, reason, advice=advice)
        wide = [matrix for matrix in layer.matrices if matrix not in self._forms(name, layer)]
        if wide:
            reason = f"NF4 needs a multiple of {nf4.BLOCK_SIZE} inputs of {', '.join(wide)}"
            raise self._layer_error(name, reason)
        return super().reason_to_skip(name, layer)


def matrices_of(name: str, layer: nn.Module) -> Mapping[str, nn.Parameter]:
    """Return the weights of a layer that get adapters of their own, by the names that patterns
    match."""
    if isinstance(layer, StackedExperts):
        return {f"{name}.{matrix}": layer.get_parameter(matrix) for matrix in layer.matrices}
    return {name: layer.get_parameter("weight")}


def check_complete(adapted: nn.Module, trained: set[str]) -> None:
    """Raise `UserError` if a run `trained` parameters outside the adapter in `adapted`."""
    if others := sorted(trained.difference(trained_names(adapted))):
        raise UserError(
            "PEFT files hold only one adapter, but other weights were trained: "
            f"{summarize_names(others)}"
        )
