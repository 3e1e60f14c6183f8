"""Small models in Hugging Face format for tests."""

from pathlib import Path
from typing import Any

import torch

FLOAT32 = {"training__mixed_precision_param": "float32"}
LAST_IN_HF = {
    "checkpoint__enable": True,
    "checkpoint__interval": 3,
    "checkpoint__last_save_in_hf": True,
}


def make_pretrained(folder: Path, dtype: torch.dtype = torch.float32, **fields: Any) -> Path:
    """Save a random Llama of transformers in `folder`, with the sizes of the tiny runs except the
    vocabulary; `fields` of its configuration may differ. Return `folder`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    defaults = {
        "vocab_size": 2048,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.2,
    }
    LlamaForCausalLM(LlamaConfig(**(defaults | fields))).to(dtype).save_pretrained(folder)
    return folder


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights in `folder`, read by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return model.state_dict()


def from_folder(folder: Path) -> dict[str, object]:
    """Return the options of a run that starts from the weights in `folder`."""
    return {"checkpoint__initial_load_path": folder, "checkpoint__initial_load_in_hf": True}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Check that two sets of weights are exactly equal."""
    assert one.keys() == other.keys()
    assert [name for name, tensor in one.items() if not torch.equal(tensor, other[name])] == []
