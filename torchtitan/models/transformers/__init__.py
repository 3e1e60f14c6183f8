"""Any class of transformers that predicts the next token, for models without a family of their own."""

from dataclasses import replace
from typing import Any

from torchtitan.models.families import Family
from torchtitan.models.transformers.description import written_document
from torchtitan.models.transformers.model import TransformersModel
from torchtitan.models.transformers.sharding import class_plan
from torchtitan.models.transformers.weights import adapter, class_adapter
from torchtitan.protocols import ModelSpec
from torchtitan.protocols.state_dict_adapter import ExternalFormat

_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "vocab_size": 512,
}


def _small(model_type: str, **document: Any) -> TransformersModel.Config:
    return TransformersModel.Config(
        dim=_SIZES["hidden_size"],
        max_seq_len=_SIZES["max_position_embeddings"],
        document={"model_type": model_type, **_SIZES, **document},
    )


FLAVORS = {
    # Of no family here: a hybrid of short convolutions and attention; attention and network in parallel, with windows.
    "debugmodel": _small("lfm2", layer_types=["conv", "conv", "full_attention", "conv"]),
    "debugmodel_dense": _small("cohere2", sliding_window=64),
}

FORMATS = {
    "hf": ExternalFormat(
        adapter=adapter,
        to_external=lambda model: written_document(model.document, model.vocab_size),
        from_external=TransformersModel.Config.of,
        class_adapter=class_adapter,
    )
}


class _AnyClass(Family):
    """Models whose sharding plan depends on their class."""

    def spec(self, model: TransformersModel.Config, flavor: str) -> ModelSpec:  # type: ignore[override]
        plan, _ = class_plan(model.document)
        return replace(super().spec(model, flavor), sharding=plan)


FAMILY = _AnyClass(module=__name__, flavors=FLAVORS, formats=FORMATS)
model_spec, model_registry = FAMILY.spec, FAMILY.registry
