"""Reward models: a class of transformers with one score per token instead of logits."""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

from torchtitan.models.common.hugging_face_keys import CLASSIFIER
from torchtitan.models.transformers.description import class_of, transformers_config
from torchtitan.models.transformers.head import OutputPlace, output_name
from torchtitan.models.transformers.output import logit_transform
from torchtitan.models.transformers.tiny import (
    CLONE_TOLERANCE,
    TEXT_IDS,
    random_clone,
    text_inputs,
    trial,
)
from torchtitan.protocols.initializer import Constant, with_initializers
from torchtitan.tools.errors import in_words

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


SCORE = "score"
"""Name of the output layer in transformers' classes with one label."""


def with_score(model: "PreTrainedModel") -> None:
    """Replace the output layer of a class by a linear function of the same hidden states, initially
    0."""
    output = model.get_output_embeddings()
    width, device = output.weight.shape[1], output.weight.device
    score = nn.Linear(width, 1, bias=False, device=device)
    model.set_submodule(output_name(model), with_initializers(score, weight=Constant(0.0)))


def classifier_name(config: "PretrainedConfig") -> str:
    """Return the class of transformers that reads the reward model of a configuration, or the name
    that it would have."""
    cls, part = class_of(config)
    names = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    return names.get(part.model_type) or cls.__name__.partition("For")[0] + CLASSIFIER


@trial
def reason_against_scores(document: Mapping[str, object]) -> str:
    """Return why the class of a config.json cannot compute scores ("": it can). If transformers has
    a class for scores, it must compute the same one with the same tensors, since it opens the
    exports."""
    config = transformers_config(document)
    name = class_of(config)[0].__name__
    if logit_transform(document) is None:
        return f"{name} computes its logits itself, and its hidden states are not known"
    classifier = getattr(transformers, classifier_name(config), None)
    if classifier is None:
        return ""
    try:
        return _difference(random_clone(config), classifier)
    except Exception as error:  # classes raise various types
        return f"a trial of {classifier.__name__} failed: {in_words(error):.200}"


def _difference(model: "PreTrainedModel", classifier: type["PreTrainedModel"]) -> str:
    """Return how a class for scores differs from a language model with a score."""
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    config.get_text_config().pad_token_id = 0  # not in the text, whose last token has the score
    other = classifier._from_config(config, dtype=torch.float32).eval()
    with_score(model)
    score_1D = torch.randn(model.get_submodule(output_name(model)).get_parameter("weight").shape)
    place = OutputPlace(model, computes=False)
    model.set_submodule(output_name(model), place)
    names = {name for name in other.state_dict() if not name.startswith(f"{SCORE}.")}
    tensors = model.state_dict()
    if different := names ^ tensors.keys():
        return f"{classifier.__name__} has other weights, such as {min(different)}"
    other.load_state_dict({**tensors, f"{SCORE}.weight": score_1D})
    tokens_1L = torch.arange(TEXT_IDS.start, TEXT_IDS.start + 17)[None]
    model(**text_inputs(model, tokens_1L))
    found = F.linear(place.hidden.pop()[0, -1], score_1D)
    expected = other(**text_inputs(other, tokens_1L)).logits[0]
    if (found - expected).abs().max() <= CLONE_TOLERANCE * expected.abs().max():
        return ""
    return f"{classifier.__name__} computes other scores from the same weights"
