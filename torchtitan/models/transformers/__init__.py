"""Any class of transformers that predicts the next token, for models without a built-in family."""

from torchtitan.models.families import SMALL, Family
from torchtitan.models.transformers.description import (
    class_of,
    type_of_architecture,
    unknown_keys,
    written_document,
)
from torchtitan.models.transformers.model import TransformersModel
from torchtitan.models.transformers.scores import classifier_name
from torchtitan.models.transformers.sharding import class_plan
from torchtitan.models.transformers.weights import adapter, class_adapter
from torchtitan.protocols.state_dict_adapter import ExternalFormat

__all__ = [
    "FAMILY",
    "FLAVORS",
    "FORMATS",
    "model_registry",
    "model_spec",
    "type_of_architecture",
    "unknown_keys",
]


def _small(model_type: str, **document: object) -> TransformersModel.Config:
    sizes = {"hidden_size": SMALL["dim"], "intermediate_size": SMALL["ffn_dim"], "vocab_size": 512}
    sizes |= {
        "num_hidden_layers": 4,
        "num_attention_heads": SMALL["n_heads"],
        "num_key_value_heads": 4,
    }
    max_seq_len = SMALL["max_seq_len"]
    sizes["max_position_embeddings"] = max_seq_len
    return TransformersModel.Config(
        dim=SMALL["dim"],
        max_seq_len=max_seq_len,
        document={"model_type": model_type, **sizes, **document},
    )


FLAVORS = {
    # Of no family here: a hybrid of short convolutions and attention; attention and network in
    # parallel, with windows.
    "debugmodel": _small("lfm2", layer_types=["conv", "conv", "full_attention", "conv"]),
    "debugmodel_dense": _small("cohere2", sliding_window=64),
}


def _written(model: TransformersModel.Config) -> dict[str, object]:
    config = model.transformers_config()
    if not model.scores:
        return written_document(config, class_of(config)[0].__name__)
    class_of(config)[1].num_labels = 1
    return written_document(config, classifier_name(config))


FORMATS = {
    "hf": ExternalFormat(
        adapter=adapter,
        to_external=_written,
        from_external=TransformersModel.Config.of,
        class_adapter=class_adapter,
    )
}


FAMILY = Family(
    module=__name__,
    flavors=FLAVORS,
    formats=FORMATS,
    sharding=lambda model: class_plan(model.document)[0],
)
model_spec, model_registry = FAMILY.spec, FAMILY.registry
