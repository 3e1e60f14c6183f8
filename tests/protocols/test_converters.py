"""Converters: layer selection, validation, initial weights, and sharding of a converted model."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.processes import run_processes
from tests.training import TINY, flags, llama_config, tiny_config
from torchtitan.config.manager import ConfigManager
from torchtitan.distributed import initialize_weights
from torchtitan.distributed.tensor_parallel import apply_tensor_parallel
from torchtitan.models.llama3 import SHARDING
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.protocols import LayerConverter, ModelConverter
from torchtitan.protocols.conversion import convert_model
from torchtitan.protocols.converter import hugging_face_name
from torchtitan.protocols.initializer import (
    Constant,
    DerivedRows,
    initializers_of,
    with_initializers,
)
from torchtitan.protocols.sharding import with_features
from torchtitan.tools.errors import UserError
from torchtitan.tools.patterns import without_numbers


class Rescaled(nn.Linear):
    """Linear layer with outputs scaled by the norms of its initial rows, and inputs scaled by
    ones."""

    def __init__(self, layer: nn.Linear):
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.scale = nn.Parameter(torch.empty(layer.out_features, device="meta"))
        self.gate = nn.Parameter(torch.empty(layer.in_features, device="meta"))
        plain = initializers_of(layer)["weight"]
        norms = DerivedRows("weight", layer.weight.shape, plain, lambda rows: rows.norm(dim=1))
        with_initializers(self, weight=plain, scale=norms, gate=Constant(1.0))
        with_features(self, scale=("out",), gate=("in",))

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input * self.gate, self.weight) * self.scale


class Rescale(LayerConverter):
    @dataclass(kw_only=True, slots=True)
    class Config(LayerConverter.Config):
        """Selection of layers."""

    def convert_layer(self, name: str, layer: nn.Module) -> nn.Module:
        assert isinstance(layer, nn.Linear)
        return Rescaled(layer)


class AnotherRescale(Rescale):
    pass


class Frozen(ModelConverter):
    """Freeze all parameters except norms."""

    freezes = True

    def convert(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)


class UndeclaredFrozen(Frozen):
    """Freeze the same parameters without declaring it."""

    freezes = False


def make_model(**options: object) -> Llama3Model:
    with torch.device("meta"):
        return llama_config(ffn_dim=64, **options).build()


def converted_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Rescaled)]


class TestSelection:
    def test_all_layers_except_the_head_are_converted(self):
        model = make_model()
        convert_model(model, [Rescale.Config().build()])
        linears = {
            name for name, module in make_model().named_modules() if isinstance(module, nn.Linear)
        }
        assert set(converted_names(model)) == linears - {"head.output"}

    def test_include_and_exclude(self):
        model = make_model()
        config = Rescale.Config(
            include=["wq", r"layers\.1\.feed_forward"], exclude=["w2", r"\.0\."]
        )
        convert_model(model, [config.build()])
        assert converted_names(model) == [f"layers.1.{name}" for name in ("attention.wq", *FFN)]

    @pytest.mark.parametrize(
        ("theirs", "ours"),
        [
            (["q_proj", "v_proj"], [r"\.wq$", r"\.wv$"]),
            (["self_attn"], ["attention"]),
            ([r"mlp\.", "o_proj"], ["feed_forward", r"\.wo$"]),
            (["gate_proj", "up_proj", "down_proj"], ["w1", "w3", "w2"]),
        ],
    )
    def test_names_of_transformers_select_the_same_layers(self, theirs, ours):
        models = [make_model(), make_model()]
        for model, include in zip(models, (theirs, ours), strict=True):
            convert_model(model, [Rescale.Config(include=include).build()])
        assert converted_names(models[0]) == converted_names(models[1]) != []

    def test_names_of_transformers_are_those_of_its_class(self):
        config = pytest.importorskip("transformers").LlamaConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
        with torch.device("meta"):
            theirs = pytest.importorskip("transformers").LlamaForCausalLM(config)
        kinds = (nn.Linear, nn.Embedding)
        named = {
            name.removeprefix("model.")
            for name, module in theirs.named_modules()
            if isinstance(module, kinds)
        }
        model = make_model(n_layers=1)
        ours = [name for name, module in model.named_modules() if isinstance(module, kinds)]
        assert {hugging_face_name(name) for name in ours} == named

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"include": ["wq", "qkv"]},
                r"rescale\.include 'qkv' matches none of the layers.*layers\.\*\.attention\.w",
            ),
            ({"exclude": ["nothing"]}, r"rescale\.exclude 'nothing' matches none"),
            ({"include": ["output"]}, r"rescale\.include 'output' matches none"),
            ({"include": ["wq"], "exclude": ["attention"]}, "no layer is left to convert"),
            ({"include": ["("]}, r"'\(' is not a regular expression"),
            ({"include": []}, "include is empty"),
        ],
    )
    def test_patterns_without_a_layer_are_rejected(self, options, message):
        with pytest.raises(UserError, match=message):
            Rescale.Config(**options).build().check_model(make_model())

    def test_two_converters_of_one_layer_are_rejected(self):
        converters = [
            Rescale.Config(include=["wq"]).build(),
            AnotherRescale.Config(include=["wk", "wq"]).build(),
        ]
        with pytest.raises(
            UserError,
            match=r"layers\.0\.attention\.wq is already converted by rescale, and another",
        ):
            convert_model(make_model(), converters)
        convert_model(make_model(), [converters[0], AnotherRescale.Config(include=["wk"]).build()])

    def test_converted_and_unchanged_layers_are_logged(self, log):
        convert_model(make_model(), [Rescale.Config(include=["wq", "w1"]).build()])
        assert log.messages == [
            "rescale: 4 layers converted: layers.*.attention.wq, layers.*.feed_forward.w1; "
            "unchanged: tok_embeddings, layers.*.attention_norm, layers.*.attention.wk, "
            "layers.*.attention.wv, layers.*.attention.wo, layers.*.ffn_norm, "
            "layers.*.feed_forward.w2, layers.*.feed_forward.w3, head.norm, head.output"
        ]

    def test_layer_numbers_become_wildcards(self):
        assert without_numbers(["layers.0.w1", "layers.10.w1", "layers.3", "w2.x"]) == [
            "layers.*.w1",
            "layers.*",
            "w2.x",
        ]


FFN = ("feed_forward.w1", "feed_forward.w3")


class TestRuns:
    """Converters in a run: validation, options on the command line, and frozen weights."""

    def test_a_pattern_without_a_layer_is_rejected_before_the_run(self, tmp_path):
        config = tiny_config(tmp_path)
        config.model_converters = [Rescale.Config(include=["qkv"])]
        with pytest.raises(UserError, match=r"rescale\.include 'qkv' matches none of the layers"):
            config.check(world_size=1)

    def test_patterns_from_the_command_line(self, tmp_path):
        folder = tmp_path / "my_module"
        folder.mkdir()
        (folder / "__init__.py").write_text("")
        (folder / "config_registry.py").write_text(
            "from tests.protocols.test_converters import Rescale\n"
            "from torchtitan.models.llama3.config_registry import llama3_debugmodel\n\n\n"
            "def rescaled():\n"
            "    config = llama3_debugmodel()\n"
            "    config.model_converters = [Rescale.Config()]\n"
            "    return config\n"
        )
        options = {
            **TINY,
            "dump_folder": tmp_path,
            "model_converters.rescale.include": ["wq", "w2"],
        }
        words = ["--module", str(folder), "--config", "rescaled", *flags(options)]
        config = ConfigManager().parse_args(words).config
        config.check(world_size=1)
        trainer = config.build()
        (model,) = trainer.model_parts
        assert converted_names(model) == [
            f"layers.{layer}.{name}"
            for layer in (0, 1)
            for name in ("attention.wq", "feed_forward.w2")
        ]
        trainer.train()
        trainer.close()
        document = config.to_dict()["model_converters"]
        assert document == {"rescale": {"include": ["wq", "w2"], "exclude": []}}

    def test_frozen_weights_need_fewer_flops_and_are_stored_in_the_compute_dtype(self, tmp_path):
        config = tiny_config(tmp_path, training__mixed_precision_param="bfloat16")
        plain = config.build()
        plain.close()
        config.model_converters = [Frozen.Config()]
        trainer = config.build()
        trainer.train()
        trainer.close()
        (model,) = trainer.model_parts
        head_and_layers = [
            p
            for name, p in model.named_parameters()
            if "norm" not in name and "tok_emb" not in name
        ]
        saved = 2 * sum(p.numel() for p in head_and_layers)  # the gradients of the weights
        # no parameter before it has a gradient
        saved += 2 * model.layers["0"].attention_norm.weight.numel()
        assert trainer.flops_per_token == plain.flops_per_token - saved
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        products = {
            f"{name}.weight"
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
        }
        assert {name for name, dtype in dtypes.items() if dtype == torch.bfloat16} == products
        assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
        config.model_converters = [UndeclaredFrozen.Config()]
        trainer = config.build()
        trainer.close()
        assert {parameter.dtype for parameter in trainer.model_parts[0].parameters()} == {
            torch.float32
        }


def initial_weights(model: nn.Module) -> dict[str, Tensor]:
    initialize_weights(model.to_empty(device="cpu"), seed=3)
    return {
        name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()
        for name, parameter in model.named_parameters()
    }


def rescaled_model() -> nn.Module:
    model = make_model()
    convert_model(model, [Rescale.Config().build()])
    return model


def test_derived_initial_values_match_the_plain_model():
    plain, converted = initial_weights(make_model()), initial_weights(rescaled_model())
    for name, weight in plain.items():
        assert torch.equal(converted[name], weight), name
    for name in converted_names(rescaled_model()):
        assert torch.equal(converted[f"{name}.scale"], plain[f"{name}.weight"].norm(dim=1)), name
        assert torch.equal(converted[f"{name}.gate"], torch.ones_like(converted[f"{name}.gate"]))


def check_layouts() -> None:
    """Check on two processes that FSDP and tensor parallelism have the initial weights and outputs
    of one process."""
    whole_model = rescaled_model()
    whole = initial_weights(whole_model)
    mesh = init_device_mesh("cpu", (2,))
    sharded, split = rescaled_model(), rescaled_model()
    fully_shard(sharded, mesh=mesh)
    apply_tensor_parallel(split, mesh, SHARDING, disable_loss_parallel=True)
    for model in (sharded, split):
        for name, value in initial_weights(model).items():
            assert torch.equal(value, whole[name]), name
    wq, wo = (getattr(split.layers["0"].attention, name) for name in ("wq", "wo"))
    placements = {
        name: str(p.placements[0]) for layer in (wq, wo) for name, p in layer.named_parameters()
    }
    # placements of wo, which is last
    assert placements == {"weight": "S(1)", "scale": "R", "gate": "S(0)"}
    assert {name: str(p.placements[0]) for name, p in wq.named_parameters()} == {
        "weight": "S(0)",
        "scale": "S(0)",
        "gate": "R",
    }
    tokens = torch.randint(0, 99, (2, 8), generator=torch.Generator().manual_seed(0))
    # Float32 sums in a different order.
    torch.testing.assert_close(split(tokens), whole_model(tokens), atol=1e-5, rtol=1e-4)


def test_parameters_of_a_converted_layer_are_sharded_by_their_features():
    run_processes(check_layouts, 2)
