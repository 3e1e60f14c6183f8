"""Exports in Hugging Face format, opened by CTranslate2 and mlx-lm, where these are installed (pip
install ctranslate2==4.8.5 mlx-lm==0.32.2 mlx-cpu), with the logits of transformers; and by the
parser of configurations of vLLM (pip install --no-deps --target FOLDER vllm==0.29.0 cbor2 cachetools
msgspec blake3 pyzmq py-cpuinfo, and PYTHONPATH=FOLDER)."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from tests.models import family_cases
from torchtitan.cli.main import main
from torchtitan.components.tokenizer import EMBEDDED_TOKENIZER

transformers = pytest.importorskip("transformers")

VOCAB = 2048
IDS = torch.randint(VOCAB, (1, 40), generator=torch.Generator().manual_seed(0))
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 32},
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16}
EXPERTS = {"num_experts_per_tok": 2}
QWEN_EXPERTS = {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 48, "norm_topk_prob": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, scaled": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", {**EXPERTS, "num_local_experts": 4, "sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", {**QWEN_EXPERTS, "head_dim": 16}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3_text": ("gemma3_text", {**GEMMA, "num_hidden_layers": 7}),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {}),
    "smollm3": ("smollm3", {}),
    "glm4": ("glm4", {"head_dim": 16}),
}
EQUAL = 5e-6
"""Sums of float32 in another order, in standard deviations of the logits."""


def export(folder: Path, name: str) -> tuple[Path, Tensor]:
    """Write a random model, convert it, and return the folder and the logits of transformers."""
    model_type, fields = CASES[name]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = transformers.AutoConfig.for_model(
        model_type, **({**sizes, **ids, "max_position_embeddings": 128} | fields)
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.08)
    model.save_pretrained(folder / "model")
    for file in EMBEDDED_TOKENIZER.glob("*.json"):
        shutil.copy(file, folder / "model")
    settings = folder / "model/tokenizer_config.json"
    # CTranslate2 needs a token for unknown words in some families.
    named = {"unk_token": "<|end_of_text|>", **json.loads(settings.read_text())}
    settings.write_text(json.dumps(named))
    words = ["--export_dtype", "float32", str(folder / "model"), str(folder / "out")]
    assert main(["convert", "--to", "hf", *words]) == 0
    with torch.no_grad():
        return folder / "out", model.eval()(IDS).logits[0]


def logits_of_ctranslate2(folder: Path) -> Tensor:
    ctranslate2 = pytest.importorskip("ctranslate2")
    from ctranslate2.converters import TransformersConverter

    converted = str(folder.parent / "ctranslate2")
    TransformersConverter(str(folder)).convert(converted)
    generator = ctranslate2.Generator(converted, device="cpu", compute_type="float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    words = [tokenizer.convert_ids_to_tokens(IDS[0].tolist())]
    return torch.tensor(numpy.array(generator.forward_batch(words)))[0]


def logits_of_mlx(folder: Path) -> Tensor:
    mx = pytest.importorskip("mlx.core", exc_type=ImportError)
    utils = pytest.importorskip("mlx_lm.utils", exc_type=ImportError)
    model, _ = utils.load_model(folder)
    return torch.tensor(numpy.array(model(mx.array(IDS.numpy())).astype(mx.float32)))[0]


def difference(read: Callable[[Path], Tensor], folder: Path, name: str) -> float:
    exported, expected = export(folder, name)
    return ((read(exported) - expected).abs().max() / expected.std()).item()


UNKNOWN_TO_CTRANSLATE2 = ("mixtral", "qwen3_moe", "phi3", "olmo2", "granite", "smollm3", "glm4")
"""Families that CTranslate2 4.8.5 does not convert, with transformers 5."""

DIFFERENT = {
    # findings/ctranslate2_gemma2_without_soft_caps.sh
    ("ctranslate2", "gemma2"),
    # 1.5e-3 with a context of 32, 2e-5 with one of 8192
    ("ctranslate2", "llama, scaled"),
    # the exact GELU in place of its approximation by tanh
    ("mlx_lm", "gemma"),
}


def check(library: str, read: Callable[[Path], Tensor], name: str, folder: Path) -> None:
    is_equal = difference(read, folder, name) < EQUAL
    assert is_equal == ((library, name) not in DIFFERENT)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in UNKNOWN_TO_CTRANSLATE2])
def test_ctranslate2(name, tmp_path):
    check("ctranslate2", logits_of_ctranslate2, name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_mlx_lm(name, tmp_path):
    check("mlx_lm", logits_of_mlx, name, tmp_path)


def _parsed_by_vllm(folder: Path) -> tuple[dict[str, Any], Any]:
    """Return a configuration as vLLM's parser reads it, and the sizes that its engine derives."""
    pytest.importorskip("vllm.config", exc_type=ImportError)
    from vllm.transformers_utils.config import get_config, get_hf_text_config
    from vllm.transformers_utils.model_arch_config_convertor import (
        MODEL_ARCH_CONFIG_CONVERTORS,
        ModelArchConfigConvertorBase,
    )

    config = get_config(str(folder), trust_remote_code=False)
    text = get_hf_text_config(config)
    kind = MODEL_ARCH_CONFIG_CONVERTORS.get(text.model_type, ModelArchConfigConvertorBase)
    return json.loads(config.to_json_string(use_diff=False)), kind(config, text).convert()


SAVED = [name for name in family_cases.CASES if name != "olmo_hybrid"]
"""Models that transformers saves; see findings/transformers_saves_olmo_hybrid_unevenly.sh."""


UNKNOWN_TO_VLLM = ("ministral", "mistral4")
"""Families for which vLLM 0.29.0 lists no model, apart from transformers' own."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVED)
def test_vllm_parses_the_same_configuration(name, tmp_path):
    """As transformers reads it, in every value that both have."""
    pytest.importorskip("vllm", exc_type=ImportError)
    reference = family_cases.random_reference(name, 0)
    reference.save_pretrained(tmp_path / "model")
    assert main(["convert", "--to", "hf", str(tmp_path / "model"), str(tmp_path / "out")]) == 0
    # before vLLM registers classes of its own
    read = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    expected = json.loads(read.to_json_string(use_diff=False))
    parsed, sizes = _parsed_by_vllm(tmp_path / "out")
    if expected.get("rope_parameters", 0) is None:  # models without RoPE, for which it has defaults
        del expected["rope_parameters"]
    different = {
        key: (value, parsed[key])
        for key, value in expected.items()
        if key in parsed and parsed[key] != value
    }
    assert different == {}
    import vllm

    models = Path(vllm.__file__).parent / "model_executor/models/registry.py"
    is_known = f'"{sizes.architectures[0]}"' in models.read_text()
    assert is_known == (name not in UNKNOWN_TO_VLLM)
    for key, size in {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "num_attention_heads": sizes.total_num_attention_heads,
    }.items():
        assert size == expected[key]
    assert sizes.architectures == expected["architectures"]
    assert sizes.total_num_hidden_layers == read.num_hidden_layers
