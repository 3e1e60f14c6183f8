"""Any class of transformers that predicts the next token, for models without a family of their own."""

from torchtitan.models.families import Family
from torchtitan.models.transformers.description import written_document
from torchtitan.models.transformers.model import TransformersModel
from torchtitan.models.transformers.weights import adapter, class_adapter
from torchtitan.protocols import ShardingPlan
from torchtitan.protocols.state_dict_adapter import ExternalFormat

FLAVORS = {
    # A hybrid of short convolutions and attention, which is no family here.
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
}

FORMATS = {
    "hf": ExternalFormat(
        adapter=adapter,
        to_external=lambda model: written_document(model.document, model.vocab_size),
        from_external=TransformersModel.Config.of,
        class_adapter=class_adapter,
    )
}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS, sharding=ShardingPlan(tensor={}, attention=""))
model_spec, model_registry = FAMILY.spec, FAMILY.registry
