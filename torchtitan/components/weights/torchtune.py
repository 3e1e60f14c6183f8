"""Weights with torchtune's names, read as the tensors of the class in transformers.

torchtune copies the model's config.json next to its weights. For some classes, its queries and keys
rotate neighboring elements, like Meta's (documentation of `RotaryPositionalEmbeddings`). The rules
below are compared with what torchtune 0.6.1 writes.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial, reduce
from pathlib import Path

import torch
from torch import Tensor

from torchtitan.components.weights.huggingface import HuggingFaceSource
from torchtitan.components.weights.torch_files import PickledSource
from torchtitan.components.weights.views import ChainedSource, Recipe, View
from torchtitan.protocols.state_dict_adapter import RopePermutation
from torchtitan.protocols.tensor_source import TensorSource, TensorSpec
from torchtitan.tools.errors import UserError, summarize_names
from torchtitan.tools.logging import logger

_ROTATE_NEIGHBORS = {
    "llama": True,
    "mistral": True,
    "gemma": True,
    "gemma2": True,
    "qwen2": False,
    "qwen3": False,
    "phi3": False,
}
"""`model_type` → whether its queries and keys have Meta's order of rows."""

_OTHERWISE = {
    "gemma2": "limits the last hidden state (final_logit_softcapping), transformers the logits",
    "qwen3": "normalizes queries and keys after their rotation in some versions, transformers "
    "before it",
}
"""`model_type` → what torchtune computes otherwise than the class in transformers."""

_ENDS = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "norm.rms_norm.scale": "model.norm.weight",  # Gemma 2
    "output.weight": "lm_head.weight",
}

_MODULES = {
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.output_proj": "self_attn.o_proj",
    "mlp.w1": "mlp.gate_proj",
    "mlp.w2": "mlp.down_proj",
    "mlp.w3": "mlp.up_proj",
}

_PLAIN_NORMS = {"sa_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_NORMS_OF: Mapping[str, Mapping[str, str]] = {
    # By the place where torchtune applies them; to the norms of the feed-forward network, version
    # 0.6.1 gives the weights of each other (findings/torchtune_exchanges_norms_of_gemma2.sh).
    "gemma2": {
        "sa_norm": "input_layernorm",
        "sa_scale": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_scale": "post_feedforward_layernorm",
    },
    "qwen3": {
        **_PLAIN_NORMS,
        "attn.q_norm": "self_attn.q_norm",
        "attn.k_norm": "self_attn.k_norm",
    },
}
"""Norms of classes that have others than `_PLAIN_NORMS`."""

_FUSED_OF: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "phi3": {
        "self_attn.qkv_proj": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.w1", "mlp.w3"),
    }
}
"""Layers that a class in transformers has as one."""

_ADAPTER_PARTS = {
    "lora_a.weight": "lora_A.weight",
    "lora_b.weight": "lora_B.weight",
    "magnitude": "lora_magnitude_vector",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+?)\.([^.]+)")
_ADAPTED = re.compile(rf"(?:layers\.(\d+)\.)?(.+?)\.({'|'.join(map(re.escape, _ADAPTER_PARTS))})")


def stored(files: list[Path]) -> TensorSource:
    """Return the tensors of all files, unchanged. Raise `UserError` if two have one of a name."""
    sources = [_of_file(file) for file in files]
    counts = Counter(name for source in sources for name in source.specs)
    if repeated := [name for name, count in counts.items() if count > 1]:
        names = summarize_names([file.name for file in files])
        raise UserError(f"several of {names} have {summarize_names(repeated)}; keep one model's")
    return reduce(ChainedSource, sources)


def _of_file(file: Path) -> TensorSource:
    opened = HuggingFaceSource if file.suffix == ".safetensors" else PickledSource
    return opened(file.parent, file.name)


class TorchtuneView(View):
    """A model's tensors with torchtune's names, as the class in transformers has them. `document`
    is its config.json. Raises `UserError` for another class, and for unknown names."""

    def __init__(self, source: TensorSource, document: Mapping[str, object]):
        model_type = _known_type(document)
        fused = _FUSED_OF.get(model_type, {})
        norms = _NORMS_OF.get(model_type, _PLAIN_NORMS)
        permute = _permutation(document)
        recipes, unknown = [], []
        taken = {part for parts in fused.values() for part in parts}
        for name in source.specs:
            layer = _LAYER.fullmatch(name)
            if name in _ENDS:
                recipes.append(Recipe((name,), (_ENDS[name],), None))
            elif layer and layer[2] in norms and layer[3] == "scale":
                theirs = f"model.layers.{layer[1]}.{norms[layer[2]]}.weight"
                recipes.append(Recipe((name,), (theirs,), None))
            elif layer and layer[2] in taken:
                continue
            elif layer and layer[2] in _MODULES:
                theirs = f"model.layers.{layer[1]}.{_MODULES[layer[2]]}.{layer[3]}"
                is_rotated = layer[2] in ("attn.q_proj", "attn.k_proj")
                recipes.append(Recipe((name,), (theirs,), permute if is_rotated else None))
            else:
                unknown.append(name)
        if unknown:
            raise UserError(
                f"torchtune's {summarize_names(unknown)} have no counterpart in transformers' "
                f"{model_type}"
            )
        recipes += _fused_recipes(source, fused)
        super().__init__(source, _specs(source, recipes), recipes)
        if model_type in _OTHERWISE:
            logger.warning(
                "torchtune %s, so logits differ from torchtune's",
                _OTHERWISE[model_type],
            )


class TorchtuneAdapter(View):
    """An adapter's tensors with torchtune's names, as in PEFT's file. `document` is the config.json
    of its model. Raises `UserError` for another class, and for unknown names."""

    def __init__(self, file: Path, document: Mapping[str, object]):
        source = PickledSource(file.parent, file.name)
        model_type = _known_type(document)
        if model_type in _FUSED_OF:
            raise UserError(
                f"{file}: torchtune adapts layers of {model_type} that transformers has as one; "
                "start from the merged weights that torchtune saves next to it"
            )
        permute = _permutation(document)
        recipes = []
        for name in source.specs:
            match = _ADAPTED.fullmatch(name)
            if match is None or match[2] not in (_MODULES if match[1] else ("output",)):
                raise UserError(f"{file}: {name} is not a tensor of an adapter that is read")
            layer = f"model.layers.{match[1]}.{_MODULES[match[2]]}" if match[1] else "lm_head"
            theirs = f"base_model.model.{layer}.{_ADAPTER_PARTS[match[3]]}"
            is_rotated = match[2] in ("attn.q_proj", "attn.k_proj") and match[3] != "lora_a.weight"
            recipes.append(Recipe((name,), (theirs,), permute if is_rotated else None))
        super().__init__(source, _specs(source, recipes), recipes)


def _known_type(document: Mapping[str, object]) -> str:
    model_type = document.get("model_type")
    if model_type not in _ROTATE_NEIGHBORS:
        raise UserError(
            f"weights with torchtune's names are read for {', '.join(_ROTATE_NEIGHBORS)}, not for "
            f"{model_type}; write them in Hugging Face's format, with "
            "torchtune.training.FullModelHFCheckpointer"
        )
    return str(model_type)


def _permutation(
    document: Mapping[str, object],
) -> Callable[[list[Tensor]], list[Tensor]] | None:
    """Return the change of queries' and keys' rows to the order of transformers; None if they have
    it."""
    if not _ROTATE_NEIGHBORS[_known_type(document)]:
        return None
    head_dim = document.get("head_dim")
    if head_dim is None:
        head_dim = int(str(document["hidden_size"])) // int(str(document["num_attention_heads"]))
    return partial(RopePermutation(int(str(head_dim))).to_internal, shapes=[])


def _fused_recipes(source: TensorSource, fused: Mapping[str, tuple[str, ...]]) -> list[Recipe]:
    layers = sorted({match[1] for name in source.specs if (match := _LAYER.fullmatch(name))})
    return [
        Recipe(
            tuple(f"layers.{layer}.{part}.weight" for part in parts),
            (f"model.layers.{layer}.{module}.weight",),
            lambda tensors: [torch.cat(tensors)],
        )
        for layer in layers
        for module, parts in fused.items()
    ]


def _specs(source: TensorSource, recipes: list[Recipe]) -> dict[str, TensorSpec]:
    """Return the specs of the recipes' results. Raise `UserError` if inputs are missing."""
    needed = [name for recipe in recipes for name in recipe.inputs]
    if missing := [name for name in needed if name not in source.specs]:
        raise UserError(f"missing from the checkpoint: {summarize_names(missing)}")
    specs: dict[str, TensorSpec] = {}
    for recipe in recipes:
        inputs = [source.specs[name].on_meta() for name in recipe.inputs]
        computed = inputs if recipe.compute is None else recipe.compute(inputs)
        specs |= {
            name: TensorSpec.of(tensor)
            for name, tensor in zip(recipe.outputs, computed, strict=True)
        }
    return specs
