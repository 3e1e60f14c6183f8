"""Checkpoints and adapters with torchtune's names, compared with transformers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from torchtitan.cli.main import main
from torchtitan.components.peft import LoRA
from torchtitan.components.peft.adapter_files import AdapterSource
from torchtitan.components.weights import open_source
from torchtitan.models.pretrained import load_model, spec_of
from torchtitan.protocols.conversion import converted_model
from torchtitan.tools.errors import UserError

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "head_dim": 8,
}
TOKENS = torch.arange(40).reshape(2, 20)

PAIRED = [0, 4, 1, 5, 2, 6, 3, 7]
"""Rows of a head of 8 that `FullModelHFCheckpointer(…).load_checkpoint()` of torchtune 0.6.1 returns
for Llama, Mistral, Gemma and Gemma 2: in its q_proj, row 1 is row 4 of the class in transformers."""

FAMILIES = {"llama": PAIRED, "mistral": PAIRED, "gemma": PAIRED, "gemma2": PAIRED}
FAMILIES |= {"qwen2": None, "qwen3": None, "phi3": None}
ENUM = {"llama": "LLAMA3", "mistral": "MISTRAL", "gemma": "GEMMA", "qwen2": "QWEN2"}
ENUM |= {"phi3": "PHI3_MINI"}
"""Families whose checkpoints torchtune 0.6.1 reads and writes as transformers computes them."""

THEIRS = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.scale",
    "lm_head.weight": "output.weight",
}
IN_LAYER = {
    "self_attn.q_proj": "attn.q_proj",
    "self_attn.k_proj": "attn.k_proj",
    "self_attn.v_proj": "attn.v_proj",
    "self_attn.o_proj": "attn.output_proj",
    "mlp.gate_proj": "mlp.w1",
    "mlp.down_proj": "mlp.w2",
    "mlp.up_proj": "mlp.w3",
    "input_layernorm": "sa_norm",
    "post_attention_layernorm": "mlp_norm",
}
OF_FAMILY = {
    "gemma2": {
        "post_attention_layernorm": "sa_scale",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_scale",
        "norm": "norm.rms_norm",
    },
    "qwen3": {"self_attn.q_norm": "attn.q_norm", "self_attn.k_norm": "attn.k_norm"},
}
"""Norms of a family that have other names, or that others lack."""
FUSED = {
    "self_attn.qkv_proj": (("attn.q_proj", 32), ("attn.k_proj", 16), ("attn.v_proj", 16)),
    "mlp.gate_up_proj": (("mlp.w1", 48), ("mlp.w3", 48)),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def original(family, tmp_path_factory) -> Path:
    """A random model of transformers."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp(family)
    fields = SIZES | ({"pad_token_id": 0} if family == "phi3" else {})
    if family.startswith("gemma"):
        fields["tie_word_embeddings"] = True
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def reordered(rows: Tensor, order: list[int] | None) -> Tensor:
    return rows if order is None else rows.unflatten(0, (-1, 8))[:, order].flatten(0, 1)


def with_names_of_torchtune(weights: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    in_layer = IN_LAYER | OF_FAMILY.get(family, {})
    ends = THEIRS | {"model.norm.weight": f"{in_layer.get('norm', 'norm')}.scale"}
    for name, tensor in weights.items():
        if name in ends:
            renamed[ends[name]] = tensor
            continue
        _, _, layer, rest = name.split(".", 3)
        module, kind = rest.rsplit(".", 1)
        if module in FUSED:
            parts = tensor.split([size for _, size in FUSED[module]])
            for (part, _), values in zip(FUSED[module], parts, strict=True):
                renamed[f"layers.{layer}.{part}.{kind}"] = values.clone()
            continue
        is_norm = "norm" in module
        is_rotated = module.endswith(("q_proj", "k_proj"))
        own = f"layers.{layer}.{in_layer[module]}.{'scale' if is_norm else kind}"
        renamed[own] = reordered(tensor, FAMILIES[family]) if is_rotated else tensor
    return renamed


def write(
    folder: Path,
    original: Path,
    tensors: dict[str, Tensor],
    n_files: int = 1,
    suffix: str = "bin",
) -> Path:
    folder.mkdir(parents=True)
    shutil.copy(original / "config.json", folder)
    names = sorted(tensors)
    save = save_file if suffix == "safetensors" else torch.save
    for index in range(n_files):
        part = {name: tensors[name].contiguous() for name in names[index::n_files]}
        save(part, folder / f"model-{index + 1:05d}-of-{n_files:05d}.{suffix}")
    return folder


@torch.no_grad()
def logits_of_transformers(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return model.eval()(TOKENS).logits


def test_logits(family, original, tmp_path):
    weights = with_names_of_torchtune(load_file(original / "model.safetensors"), family)
    folder = write(tmp_path / "tune", original, weights, n_files=2)
    with torch.no_grad():
        logits = load_model(folder, device="cpu").model(TOKENS)
    expected = logits_of_transformers(original)
    # Float32 sums in another order.
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    if FAMILIES[family]:
        wrong = reordered(weights["layers.0.attn.q_proj.weight"], PAIRED)
        other = write(
            tmp_path / "wrong", original, {**weights, "layers.0.attn.q_proj.weight": wrong}
        )
        with torch.no_grad():
            different = load_model(other, device="cpu").model(TOKENS)
        assert (different - expected).abs().max() > 0.01 * expected.abs().max()


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_convert(family, original, suffix, tmp_path):
    """The converted folder has the tensors of the original one, byte for byte."""
    weights = load_file(original / "model.safetensors")
    own = with_names_of_torchtune(weights, family)
    folder = write(tmp_path / "tune", original, own, n_files=3, suffix=suffix)
    assert main(["convert", "--to", "hf", str(folder), str(tmp_path / "hf")]) == 0
    converted = load_file(tmp_path / "hf/model.safetensors")
    assert converted.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in converted.items())


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters(tmp_path, kind, family):
    """An adapter with torchtune's names is the adapter of PEFT with the same values."""
    config = LoRA.Config(rank=4, alpha=6.0, dora=kind == "dora")
    document = {"model_type": family, **SIZES}
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text(json.dumps(document))
    save_file({"x": torch.zeros(1)}, tmp_path / "base/model.safetensors")
    spec = spec_of(tmp_path / "base")
    model = converted_model(spec.model, [config.build()])
    torch.manual_seed(1)
    peft, own = {}, {}
    shapes = {"q": (32, 32), "k": (16, 32), "v": (16, 32), "o": (32, 32)}
    modules = {f"self_attn.{name}_proj": shape for name, shape in shapes.items()}
    modules |= {"mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48)}
    for layer in range(2):
        for module, (n_out, n_in) in modules.items():
            order = FAMILIES[family] if module.endswith(("q_proj", "k_proj")) else None
            prefix = f"base_model.model.model.layers.{layer}.{module}"
            target = f"layers.{layer}.{IN_LAYER[module]}"
            a, b, magnitude = torch.randn(4, n_in), torch.randn(n_out, 4), torch.randn(n_out)
            peft |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
            own |= {f"{target}.lora_a.weight": a, f"{target}.lora_b.weight": reordered(b, order)}
            if config.dora:
                peft[f"{prefix}.lora_magnitude_vector"] = magnitude
                own[f"{target}.magnitude"] = reordered(magnitude, order)
    for folder in ("peft", "tune"):
        (tmp_path / folder).mkdir()
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "use_dora": config.dora}
    (tmp_path / "peft/adapter_config.json").write_text(json.dumps(settings))
    save_file(peft, tmp_path / "peft/adapter_model.safetensors")
    torch.save(own, tmp_path / "tune/adapter_model.pt")
    read, expected = (
        AdapterSource(tmp_path / folder, config, model, spec) for folder in ("tune", "peft")
    )
    assert read.specs == expected.specs
    assert all(torch.equal(read.read(name), expected.read(name)) for name in expected.specs)
    other = LoRA.Config(rank=8, alpha=6.0, dora=config.dora)
    with pytest.raises(UserError, match=r"r is 4, but .*rank is 8"):
        AdapterSource(tmp_path / "tune", other, converted_model(spec.model, [other.build()]), spec)


def test_refused(tmp_path):
    """What cannot be read right is refused with a remedy."""
    tensors = {"layers.0.attn.output_proj.weight": torch.zeros(8, 8)}

    def folder(name: str, model_type: str, weights: dict[str, Tensor]) -> Path:
        (tmp_path / "origin").mkdir(exist_ok=True)
        document = {"model_type": model_type, **SIZES}
        (tmp_path / "origin/config.json").write_text(json.dumps(document))
        return write(tmp_path / name, tmp_path / "origin", weights)

    with pytest.raises(UserError, match=r"not for gemma3_text; .*FullModelHFCheckpointer"):
        open_source(folder("gemma3", "gemma3_text", tensors))
    unknown = {**tensors, "layers.0.fusion_scale": torch.zeros(1)}
    with pytest.raises(UserError, match=r"layers.0.fusion_scale have no counterpart"):
        open_source(folder("unknown", "llama", unknown))
    incomplete = folder("incomplete", "llama", tensors)
    (incomplete / "model-00001-of-00001.bin").rename(incomplete / "model-00001-of-00002.bin")
    with pytest.raises(UserError, match=r"of 2 files of weights, it has model-00001-of-00002.bin"):
        open_source(incomplete)
    twice = folder("twice", "llama", tensors)
    for number in (1, 2):
        shutil.copy(
            incomplete / "model-00001-of-00002.bin", twice / f"model-0000{number}-of-00002.bin"
        )
    (twice / "model-00001-of-00001.bin").unlink()
    with pytest.raises(UserError, match=r"several of model-00001.* have layers.0.attn.output_proj"):
        open_source(twice)
    epoch = folder("run/epoch_0", "llama", tensors)
    (epoch.parent / "recipe_state").mkdir()
    with pytest.raises(UserError, match=r"output folder of torchtune; use .*epoch_0"):
        open_source(epoch.parent)
    with pytest.raises(UserError, match=r"several epochs: torchtune_model_0.pt, torchtune_model_1"):
        for index in range(2):
            torch.save(tensors, epoch.parent / f"torchtune_model_{index}.pt")
        open_source(epoch.parent)


def test_meta_names(tmp_path):
    """torchtune's file of Meta's names is read like Meta's file, with any of its names."""
    names = ["consolidated.00.pth", "model-00001-of-00001.bin", "model-00001-of-00001.pt"]
    names += ["meta_model_0.pt", "torchtune_model_1.pt"]
    weights = {"tok_embeddings.weight": torch.arange(96 * 32.0).view(96, 32)}
    for name in names:
        source = open_source(write_meta(tmp_path / name, [name], weights))
        assert source.specs.keys() == weights.keys()
        assert torch.equal(
            source.read("tok_embeddings.weight"), weights["tok_embeddings.weight"]
        ), name


def test_meta_names_that_are_not_read(tmp_path):
    """Several files, and safetensors, which torchtune does not write with Meta's names."""
    weights = {"layers.0.attn.output_proj.weight": torch.ones(2, 2)}
    parts = [f"model-0000{n}-of-00002.bin" for n in (1, 2)]
    with pytest.raises(UserError, match=r"in one \.bin or \.pt file, not model-00001-of-00002"):
        open_source(write_meta(tmp_path / "several", parts, weights))
    folder = write_meta(tmp_path / "safe", [], weights)
    save_file(weights, folder / "model-00001-of-00001.safetensors")
    with pytest.raises(UserError, match=r"not model-00001-of-00001\.safetensors; with a config"):
        open_source(folder)


def write_meta(folder: Path, names: list[str], weights: dict[str, Tensor]) -> Path:
    """Write the same weights into files in a folder with Meta's description of a model."""
    folder.mkdir()
    config = {"dim": 32, "n_layers": 1, "n_heads": 4, "vocab_size": 96, "multiple_of": 16}
    (folder / "params.json").write_text(json.dumps(config))
    for name in names:
        torch.save(weights, folder / name)
    return folder


@pytest.mark.slow
def test_what_torchtune_writes(family, original, tmp_path):
    """torchtune's own checkpoint, if it imports."""
    if family not in ENUM:
        pytest.skip("other tests compare what torchtune computes in another way")
    training = pytest.importorskip("torchtune.training", exc_type=ImportError)
    loader = training.FullModelHFCheckpointer(
        str(original), ["model.safetensors"], ENUM[family], str(tmp_path / "out")
    )
    start = tmp_path / "start"
    start.mkdir()
    shutil.copy(original / "config.json", start)
    torch.save(loader.load_checkpoint()["model"], start / "start.pt")
    writer = training.FullModelTorchTuneCheckpointer(
        str(start), ["start.pt"], ENUM[family], str(tmp_path / "tune")
    )
    writer.save_checkpoint(writer.load_checkpoint(), epoch=0, intermediate_checkpoint=False)
    with torch.no_grad():
        logits = load_model(tmp_path / "tune/epoch_0", device="cpu").model(TOKENS)
    expected = logits_of_transformers(original)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.slow
@torch.no_grad()
def test_logits_of_torchtunes_gemma2(tmp_path):
    """Norms are read by their place in torchtune's model, whose logits are transformers' with its
    limit moved to the hidden state."""
    pytest.importorskip("torchtune.models", exc_type=ImportError)
    from torchtune.models.gemma2 import gemma2
    from transformers import AutoModelForCausalLM, Gemma2Config

    fields = SIZES | {"head_dim": 16, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
    Gemma2Config(**fields).save_pretrained(tmp_path)
    theirs = gemma2(96, 2, 4, 16, 2, 32, 48, max_seq_len=128, query_pre_attn_scalar=16).eval()
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    folder = write(tmp_path / "tune", tmp_path, theirs.state_dict())
    assert main(["convert", "--to", "hf", str(folder), str(tmp_path / "hf")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    model.eval().config.final_logit_softcapping = None
    model.model.norm.register_forward_hook(lambda *call: 30 * torch.tanh(call[2] / 30))
    expected = theirs(TOKENS)
    # Float32 sums in another order.
    torch.testing.assert_close(
        model(TOKENS).logits, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max())
    )


@pytest.mark.slow
@torch.no_grad()
def test_logits_of_torchtunes_qwen3(tmp_path):
    """Names and order of rows are those of a model of torchtune's layers. With equal weights in a
    norm of queries or keys, it does not matter that torchtune 0.6.1 rotates first."""
    modules = pytest.importorskip("torchtune.modules", exc_type=ImportError)
    from torchtune.models.qwen2 import Qwen2RotaryPositionalEmbeddings
    from transformers import Qwen3Config

    Qwen3Config(**SIZES).save_pretrained(tmp_path)

    def linear(n_in: int, n_out: int) -> torch.nn.Linear:
        return torch.nn.Linear(n_in, n_out, bias=False)

    def layer() -> torch.nn.Module:
        attention = modules.MultiHeadAttention(
            embed_dim=32,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            q_proj=linear(32, 32),
            k_proj=linear(32, 16),
            v_proj=linear(32, 16),
            output_proj=linear(32, 32),
            pos_embeddings=Qwen2RotaryPositionalEmbeddings(8, 128, 10_000),
            q_norm=modules.RMSNorm(8, 1e-6),
            k_norm=modules.RMSNorm(8, 1e-6),
        )
        mlp = modules.FeedForward(
            gate_proj=linear(32, 48), down_proj=linear(48, 32), up_proj=linear(32, 48)
        )
        norms = {name: modules.RMSNorm(32, 1e-6) for name in ("sa_norm", "mlp_norm")}
        return modules.TransformerSelfAttentionLayer(attention, mlp, **norms)

    theirs = modules.TransformerDecoder(
        tok_embeddings=torch.nn.Embedding(96, 32),
        layers=[layer(), layer()],
        max_seq_len=128,
        num_heads=4,
        head_dim=8,
        norm=modules.RMSNorm(32, 1e-6),
        output=linear(32, 96),
    ).eval()
    torch.manual_seed(0)
    for index, (name, parameter) in enumerate(theirs.named_parameters()):
        if ".q_norm." in name or ".k_norm." in name:
            parameter.fill_(1 + 0.1 * (index % 7))
        else:
            torch.nn.init.normal_(parameter, std=0.2)
    folder = write(tmp_path / "tune", tmp_path, theirs.state_dict())
    assert main(["convert", "--to", "hf", str(folder), str(tmp_path / "hf")]) == 0
    expected = theirs(TOKENS)
    # Float32 sums in another order.
    torch.testing.assert_close(
        logits_of_transformers(tmp_path / "hf"),
        expected,
        rtol=1e-5,
        atol=1e-5 * float(expected.abs().max()),
    )
