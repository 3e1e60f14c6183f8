"""Layouts that a class of transformers may have, by its own plan and by trials of a tiny clone."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch
from tyro.conf import Suppress

from torchtitan.models.common.hugging_face_keys import describes_scores
from torchtitan.models.transformers import stages
from torchtitan.models.transformers.balance import has_formula, returns_router_loss
from torchtitan.models.transformers.context import unsupported_context
from torchtitan.models.transformers.description import (
    checked_document,
    class_of,
    transformers_config,
)
from torchtitan.models.transformers.experts import class_experts, unsupported_experts
from torchtitan.models.transformers.per_layer import PerLayer
from torchtitan.models.transformers.sharding import class_plan
from torchtitan.models.transformers.tiny import tiny_config
from torchtitan.protocols.model import BaseModel
from torchtitan.tools.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(kw_only=True, slots=True)
class ClassConfig(BaseModel.Config):
    """A config.json, with the sizes of the language model, and its layouts."""

    document: Suppress[dict[str, object]]
    """Content of config.json."""
    reads_images: Suppress[bool] = False
    """True if batches have images."""

    @classmethod
    def of(cls, document: Mapping[str, object]) -> Self:
        """Return the configuration for a config.json. Raise `UserError` as
        `checked_document`."""
        kept = checked_document(document)
        text = transformers_config(kept).get_text_config(decoder=True)
        for size in ("hidden_size", "vocab_size"):
            if not isinstance(getattr(text, size, None), int):
                raise UserError(
                    f"config.json: {type(text).__name__} has no {size}, so it is not a "
                    "language model"
                )
        most = getattr(text, "max_position_embeddings", None) or 2**20
        return cls(
            dim=text.hidden_size,
            vocab_size=text.vocab_size,
            max_seq_len=most,
            scores=describes_scores(document),
            document=kept,
        )

    def transformers_config(self) -> "PretrainedConfig":
        """Return transformers' configuration object."""
        return transformers_config(self.document, self.vocab_size)

    def unsupported_parallelisms(self) -> dict[str, str]:
        reasons = {
            "tensor_parallel_degree": class_plan(self.document)[1] or self._random_states(),
            "context_parallel_degree": "it reads images"
            if self.reads_images
            else unsupported_context(self.document),
        }
        unsupported = {name: reason for name, reason in reasons.items() if reason}
        return {**unsupported, **unsupported_experts(self.document)}

    def _random_states(self) -> str:
        """Return why ranks with the same hidden states would change them differently in training,
        since each draws its own random numbers ("": they do not). Attention's are of its heads."""
        text = self.transformers_config().get_text_config(decoder=True).to_dict()
        rates = {
            key: value
            for key, value in text.items()
            if re.search("drop|jitter", key)
            and not re.search("att|classifier", key)
            and type(value) is float
            and value > 0
        }
        named = " and ".join(f"{key} {value:g}" for key, value in rates.items())
        what = "would change the same hidden states differently on each rank"
        return named and f"{named} {what}; set 0 in config.json"

    @property
    def expert_parallel_sizes(self) -> dict[str, int]:
        n_experts, _ = class_experts(self.document)
        return {"num_experts": n_experts} if n_experts else {}

    def pipeline_modules(self) -> list[str]:
        described = self.transformers_config()
        name = class_of(described)[0].__name__
        if self.reads_images:
            reason = "it reads images (--config sft_images); train on text"
        elif returns_router_loss(described) and not has_formula(described):
            reason = (
                "it computes the loss of its routers in its own way, over all layers; set "
                "output_router_logits to false in config.json"
            )
        else:
            _, reason = self.try_stages()
        if reason:
            raise UserError(
                f"--parallelism.pipeline_parallel_degree above 1 does not divide {name}: {reason}"
            )
        with torch.device("meta"):
            return stages.divide(self.build()).names

    @property
    def shared_modules(self) -> list[str]:
        with torch.device("meta"):
            model = self.build()
        return stages.divide(model).names[:1] if model.is_tied else []

    @property
    def n_layers(self) -> int:
        """Number of layers of the language model; 0 if the class does not count them."""
        return self._per_layer().n_layers

    @property
    def layer_kinds(self) -> list[object]:
        return [*self._per_layer().kinds()]

    def _per_layer(self) -> PerLayer:
        text = self.transformers_config().get_text_config(decoder=True)
        return PerLayer.of(text.to_dict())

    def with_layers(self, n_layers: int) -> Self:
        whole = self.transformers_config()
        text = whole.get_text_config(decoder=True)
        values = {**self.document, **json.loads(whole.to_json_string(use_diff=False))}
        part = next((name for name, value in vars(whole).items() if value is text), None)
        of_text = values if part is None else values[part]
        layers = PerLayer.of(of_text)
        layers.keep(of_text, range(n_layers))
        fewer = replace(self, document=checked_document(values))
        _check_layers(layers, of_text, fewer.transformers_config().get_text_config(decoder=True))
        return fewer

    def tiny(self) -> Self:
        """Return the configuration of a tiny clone, for trials."""
        document = tiny_config(self.transformers_config()).to_json_string(use_diff=False)
        return type(self).of(json.loads(document))

    def try_stages(self) -> tuple[frozenset[str], str]:
        """Return the result of the trial `stages.try_stages`."""
        return stages.try_stages(self)

    @property
    def tensor_parallel_sizes(self) -> dict[str, int]:
        text = self.transformers_config().get_text_config(decoder=True)
        layers = text.per_layer_config if text.is_heterogeneous else [text]
        sizes = {}
        for name in ("num_attention_heads", "num_key_value_heads"):
            of_layers = [getattr(layer, name, None) for layer in layers]
            known = [size for size in of_layers if isinstance(size, int)]
            if known:
                sizes[name] = math.gcd(*known)  # a degree must divide each layer's
        return sizes


def _check_layers(layers: PerLayer, wanted: Mapping[str, object], text: "PretrainedConfig") -> None:
    """Raise `UserError` if a configuration has changed its layers, as Gemma 4's does with the kind
    of the last one."""
    found = text.to_dict()
    changed = [name for name in sorted(layers.names & found.keys()) if found[name] != wanted[name]]
    if changed:
        raise UserError(
            f"{type(text).__name__} changes {' and '.join(changed)} if only the first layers are "
            "kept"
        )
