"""Any class of transformers that predicts the next token, for models without a family of their own."""

from dataclasses import replace

from torchtitan.models.families import Family
from torchtitan.models.transformers.description import written_document
from torchtitan.models.transformers.model import TransformersModel
from torchtitan.models.transformers.sharding import class_plan
from torchtitan.models.transformers.weights import adapter, class_adapter
from torchtitan.protocols import ModelSpec
from torchtitan.protocols.state_dict_adapter import ExternalFormat

FLAVORS = {
    # Of no family here: a hybrid of short convolutions and attention; attention and network in parallel, with windows.
    "debugmodel": TransformersModel.Config(
        dim=256,
        max_seq_len=2048,
        document={
            "model_type": "lfm2",
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "max_position_embeddings": 2048,
            "vocab_size": 512,
        },
    ),
    "debugmodel_dense": TransformersModel.Config(
        dim=256,
        max_seq_len=2048,
        document={
            "model_type": "cohere2",
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "sliding_window": 64,
            "max_position_embeddings": 2048,
            "vocab_size": 512,
        },
    ),
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
