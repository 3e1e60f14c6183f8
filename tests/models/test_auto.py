"""`MODULE=auto`: model and training configuration from the config.json or params.json of a
folder."""

import json
import logging
import sys
from pathlib import Path

import pytest
import torch

from tests.commands import run_command
from torchtitan.components.data.base import Batch
from torchtitan.config.manager import ConfigManager
from torchtitan.config.registry import built_in_modules, list_module
from torchtitan.models.common.rope import RoPEConfig, rope_frequencies
from torchtitan.models.llama3 import FLAVORS, FORMATS, Llama3Model
from torchtitan.models.llama3.meta import _ffn_dim, _ffn_parameters
from torchtitan.tools.errors import UserError

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 64,
}

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
}


def from_hf(**changes: object) -> Llama3Model.Config:
    """Return the model of `SMALL` with changed keys; `...` removes a key."""
    document = {key: value for key, value in {**SMALL, **changes}.items() if value is not ...}
    return FORMATS["hf"].from_external(document)


class TestConfigJson:
    def test_sizes(self):
        assert from_hf() == Llama3Model.Config(
            dim=32,
            n_layers=3,
            n_heads=4,
            n_kv_heads=2,
            ffn_dim=56,
            vocab_size=2048,
            max_seq_len=256,
            norm_eps=1e-6,
            tie_embeddings=True,
            rope=RoPEConfig(theta=10_000.0),
        )

    def test_missing_keys_have_transformers_defaults(self):
        transformers = pytest.importorskip("transformers")
        names = (
            "num_key_value_heads",
            "rms_norm_eps",
            "tie_word_embeddings",
            "rope_theta",
            "head_dim",
        )
        config = from_hf(**dict.fromkeys(names, ...))
        theirs = transformers.LlamaConfig(
            **{key: value for key, value in SMALL.items() if key not in names}
        )
        assert config.n_kv_heads == theirs.num_key_value_heads
        assert config.norm_eps == theirs.rms_norm_eps
        assert config.tie_embeddings == theirs.tie_word_embeddings
        assert config.rope.theta == theirs.rope_parameters["rope_theta"]
        assert config.resolved_head_dim == theirs.head_dim

    @pytest.mark.parametrize(("value", "kept"), [(None, None), (8, None), (10, 10)])
    def test_head_width(self, value, kept):
        assert from_hf(head_dim=value).head_dim == kept

    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_theta": 7e5, "rope_scaling": LLAMA3_SCALING},
            {"rope_theta": ..., "rope_parameters": {"rope_theta": 7e5, **LLAMA3_SCALING}},
        ],
        ids=["transformers 4", "transformers 5"],
    )
    def test_rope_in_both_spellings(self, rope):
        assert from_hf(**rope).rope == RoPEConfig(
            theta=7e5,
            scaling_factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=2.0,
            original_max_seq_len=64,
        )

    @pytest.mark.parametrize("key", ["type", "rope_type"])
    def test_linear_scaling(self, key):
        rope = from_hf(rope_scaling={key: "linear", "factor": 2.5}).rope
        assert rope == RoPEConfig(theta=10_000.0, scaling="linear", scaling_factor=2.5)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"model_type": "qwen2"}, "model_type is 'qwen2'.*this family is llama"),
            ({"model_type": ...}, "model_type is None"),
            ({"clip_qkv": 8.0}, r"clip_qkv is 8\.0"),
            ({"use_qk_norm": True}, "use_qk_norm is True"),
            ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
            ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5"),
            (
                {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
                r"partial_rotary_factor is 0\.5",
            ),
            ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "RoPE of type 'ntk'"),
            (
                {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": 0}},
                "truncate is 0",
            ),
            (
                {"rope_parameters": {"rope_type": "longrope"}},
                "short_factor is missing, but must be a list of numbers",
            ),
            (
                {"attn_logit_softcapping": 50.0},
                r"attn_logit_softcapping is 50\.0, which this family does not support",
            ),
            ({"num_local_experts": 8}, "num_local_experts is 8"),
            ({"rope_scaling": {"rope_type": "linear"}}, ": factor is missing"),
            (
                {"rope_scaling": {**LLAMA3_SCALING, "low_freq_factor": "low"}},
                "low_freq_factor is 'low'",
            ),
            (
                {"rope_parameters": {"rope_theta": 1e4, "attention_factor": 2.0}},
                r"RoPE's attention_factor is 2\.0",
            ),
            ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "RoPE's full_attention"),
            ({"rope_theta": "1e4"}, "rope_theta is '1e4'"),
            ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
            ({"head_dim": 8.5}, r"head_dim is 8\.5"),
            ({"head_dim": 9}, r"--model\.head_dim is 9"),
            ({"hidden_size": ...}, "hidden_size is missing, but must be a whole number"),
            ({"num_hidden_layers": "3"}, "num_hidden_layers is '3'"),
            ({"num_key_value_heads": 3}, "n_kv_heads 3 must divide"),
            ({"is_causal": False}, "is_causal is False"),
            ({"is_causal": None}, "is_causal is None"),
            ({"attention_bias": 0}, "attention_bias is 0"),
            ({"hidden_act": ["silu"]}, r"hidden_act is \['silu'\]"),
            ({"rope_scaling": "linear"}, "rope_scaling is 'linear', but must be an object"),
            ({"rope_parameters": [1]}, r"rope_parameters is \[1\]"),
            ({"rope_scaling": {"type": "linear", "factor": True}}, "factor is True"),
            (
                {"tie_word_embeddings": "false"},
                "tie_word_embeddings is 'false', but must be true or false",
            ),
            ({"tie_word_embeddings": None}, "tie_word_embeddings is None"),
            ({"rms_norm_eps": True}, "rms_norm_eps is True"),
            ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
            ({"num_hidden_layers": True}, "num_hidden_layers is True"),
            ({"attention_dropout": "0.1"}, "attention_dropout is '0.1'"),
            (
                {
                    "rope_scaling": {"type": "linear", "factor": 2.0},
                    "rope_parameters": {"rope_theta": 1e4},
                },
                "rope_scaling {'type'.*} and rope_parameters {'rope_theta'.*} differ",
            ),
            (
                {"rope_scaling": LLAMA3_SCALING, "original_max_position_embeddings": 128},
                "original_max_position_embeddings is 128, and 64 in the scaling",
            ),
        ],
    )
    def test_unsupported_setting_is_rejected_by_name(self, changes, message):
        with pytest.raises(UserError, match=message):
            from_hf(**changes)

    def test_original_context_in_either_place(self):
        transformers = pytest.importorskip("transformers")
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        without = {
            key: LLAMA3_SCALING[key] for key in LLAMA3_SCALING if not key.startswith("original")
        }
        for changes, expected in (({}, 256), ({"original_max_position_embeddings": 32}, 32)):
            rope = from_hf(rope_scaling=without, **changes, head_dim=64).rope
            document = {**SMALL, "rope_scaling": dict(without), **changes, "head_dim": 64}
            theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](
                transformers.LlamaConfig.from_dict(document), torch.device("cpu")
            )
            torch.testing.assert_close(rope_frequencies(rope, 64), theirs)
            assert rope.original_max_seq_len == expected

    def test_equivalent_spellings(self):
        rope = {"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 5e5}
        both = {
            **rope,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
        }
        assert from_hf(**both) == from_hf(**rope)
        assert from_hf(hidden_act="swish", partial_rotary_factor=None) == from_hf()

    def test_ignored_keys_are_logged(self, caplog):
        with caplog.at_level(logging.WARNING):
            from_hf(pretraining_tp=2, use_cache=True, attention_dropout=0.0, is_causal=True)
            assert not caplog.records
            from_hf(y_norm=2.0, z_norm=1, attention_dropout=0.1)
        assert "y_norm, z_norm" in caplog.text
        assert "ignoring attention_dropout 0.1" in caplog.text

    def test_written_config_is_read_back(self):
        models = [from_hf(), from_hf(head_dim=10), from_hf(rope_scaling=LLAMA3_SCALING)]
        models += [from_hf(rope_scaling={"type": "linear", "factor": 2.0})]
        for model in models:
            assert FORMATS["hf"].from_external(FORMATS["hf"].to_external(model)) == model

    @pytest.mark.parametrize(
        ("name", "flavor"),
        [
            ("meta-llama--Llama-3.2-1B", "1B"),
            ("meta-llama--Meta-Llama-3.1-8B", "8B"),
            ("meta-llama--Meta-Llama-3.1-405B", "405B"),
        ],
    )
    def test_published_models_equal_flavors(self, assets, name, flavor):
        document = json.loads((assets / "hf-configs" / f"{name}_config.json").read_text())
        assert FORMATS["hf"].from_external(document) == FLAVORS[flavor]

    def test_other_published_models_of_the_family(self, assets):
        def read(name: str) -> Llama3Model.Config:
            document = json.loads((assets / "hf-configs" / f"{name}_config.json").read_text())
            return FORMATS["hf"].from_external(document)

        first = read("meta-llama--Meta-Llama-3-8B-Instruct")
        assert (first.max_seq_len, first.rope) == (8192, RoPEConfig())

    def test_published_models_of_other_families_are_rejected(self, assets):
        refused = set()
        for path in (assets / "hf-configs").glob("*_config.json"):
            document = json.loads(path.read_text())
            if document["model_type"] != "llama":
                with pytest.raises(UserError, match=document["model_type"]):
                    FORMATS["hf"].from_external(document)
                refused.add(document["model_type"])
        assert {
            "qwen2",
            "qwen3",
            "qwen3_moe",
            "gemma2",
            "mixtral",
            "deepseek_v3",
            "gpt_oss",
        } <= refused


class TestParamsJson:
    PUBLISHED = {
        "8B": {
            "dim": 4096,
            "ffn_dim_multiplier": 1.3,
            "multiple_of": 1024,
            "n_heads": 32,
            "n_kv_heads": 8,
            "n_layers": 32,
            "norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "use_scaled_rope": True,
            "vocab_size": 128_256,
        }
    }

    def test_published_file_equals_flavor(self):
        assert FORMATS["meta"].from_external(self.PUBLISHED["8B"]) == FLAVORS["8B"]
        assert FORMATS["meta"].to_external(FLAVORS["8B"]) == self.PUBLISHED["8B"]

    @pytest.mark.parametrize("flavor", sorted(FLAVORS.keys() - {"debugmodel"}))
    def test_every_flavor_round_trips(self, flavor):
        assert (
            FORMATS["meta"].from_external(FORMATS["meta"].to_external(FLAVORS[flavor]))
            == FLAVORS[flavor]
        )

    def test_every_width_is_exact(self):
        for dim in (64, 100, 4096):
            for ffn_dim in [*range(1, 200), 172, 1023, 1024, 1025, 14336, 53248, 99_991]:
                assert _ffn_dim(dim, *_ffn_parameters(dim, ffn_dim)) == ffn_dim

    def test_llama_2(self, caplog):
        """The file has neither RoPE's base nor the vocabulary size; Hugging Face's config.json has
        width 11008."""
        document = {
            "dim": 4096,
            "multiple_of": 256,
            "n_heads": 32,
            "n_layers": 32,
            "norm_eps": 1e-5,
        }
        with pytest.raises(UserError, match="vocab_size is -1.*rows of tok_embeddings.weight"):
            FORMATS["meta"].from_external(document | {"vocab_size": -1})
        config = FORMATS["meta"].from_external(document | {"vocab_size": 32_000})
        assert (config.ffn_dim, config.n_kv_heads, config.rope.theta) == (11_008, 32, 10_000.0)
        assert config.max_seq_len == 4096
        assert "a context of 4096 are assumed" in caplog.text

    def test_default_factor_is_logged(self, caplog):
        read = FORMATS["meta"].from_external
        document = FORMATS["meta"].to_external(FLAVORS["1B"])
        caplog.clear()
        assert read(document) == FLAVORS["1B"]
        assert not caplog.records
        del document["torchtitan"]["rope_scaling_factor"]
        assert read(document).rope.scaling_factor == 8.0
        assert "8 is assumed" in caplog.text
        assert '"rope_scaling_factor": 32' in caplog.text

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"vision_chunk_size": 448}, "vision_chunk_size"),
            ({"dim": "4096"}, "dim is '4096'"),
            ({"torchtitan": {"depth": 3}}, "under 'torchtitan': depth"),
            ({"torchtitan": [1]}, r"torchtitan is \[1\], but must be an object"),
            (
                {"torchtitan": {"tie_embeddings": 1}},
                "tie_embeddings is 1, but must be true or false",
            ),
            ({"dim": True}, "dim is True"),
            ({"norm_eps": "1e-5"}, "norm_eps is '1e-5'"),
            ({"rope_theta": None}, "rope_theta is None, but must be a number"),
            ({"multiple_of": 0}, "multiple_of is 0, but must be a whole number from 1 to"),
            ({"multiple_of": None}, "multiple_of is None"),
            ({"ffn_dim_multiplier": float("nan")}, "ffn_dim_multiplier is nan"),
            ({"use_scaled_rope": "no"}, "use_scaled_rope is 'no'"),
        ],
    )
    def test_unsupported_setting_is_rejected_by_name(self, changes, message):
        with pytest.raises(UserError, match=message):
            FORMATS["meta"].from_external(self.PUBLISHED["8B"] | changes)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"head_dim": 10}, "no model.head_dim.* 10 "),
            ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
            ({"rope_scaling": LLAMA3_SCALING}, "'original_max_seq_len': 64"),
            ({"attention_bias": True}, "no biases"),
            ({"mlp_bias": True}, "no biases"),
        ],
    )
    def test_model_unsupported_by_meta_is_not_written(self, changes, message):
        with pytest.raises(UserError, match=message):
            FORMATS["meta"].to_external(from_hf(**changes))


def parse(*args: object):
    return ConfigManager().parse_args(["--module", "auto", "--config", "pretrain", *map(str, args)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    return folder


class TestAuto:
    @pytest.mark.parametrize("flag", ["--hf_assets_path", "--hf-assets-path"])
    def test_folder_sets_model_tokenizer_and_weights(self, folder, flag):
        config = parse(flag, folder).config
        assert config.model_spec.model == from_hf()
        assert (config.hf_assets_path, config.checkpoint.initial_load_path) == (
            str(folder),
            str(folder),
        )
        assert config.checkpoint.initial_load_in_hf
        assert config.training.seq_len == 256  # the model's context is shorter than 2048

    def test_explicit_option_wins(self, folder):
        config = parse(
            f"--hf_assets_path={folder}", "--model.n_layers", 2, "--model.rope.theta", "5e5"
        ).config
        assert (config.model_spec.model.n_layers, config.model_spec.model.rope.theta) == (2, 5e5)
        assert config.model_spec.model.dim == 32

    def test_saved_run_is_reproduced(self, folder, tmp_path):
        resolved = parse(
            "--hf_assets_path", folder, "--model.norm_eps", "1e-4", "--optimizer.lr", "3e-5"
        )
        resolved.save(tmp_path / "config.yaml")
        again = ConfigManager().parse_args(["--config_file", str(tmp_path / "config.yaml")])
        assert again.config == resolved.config
        moved = folder.rename(tmp_path / "moved")
        args = ["--config_file", str(tmp_path / "config.yaml"), "--hf_assets_path", str(moved)]
        assert ConfigManager().parse_args(args).config.model_spec == resolved.config.model_spec

    @pytest.mark.parametrize("args", [(), ("--hf_assets_path=",)])
    def test_folder_is_required(self, args):
        with pytest.raises(UserError, match="configuration 'pretrain' needs --hf_assets_path"):
            parse(*args)

    def test_help_without_a_folder_explains_how(self, capsys):
        with pytest.raises(SystemExit) as ended:
            parse("--help")
        assert ended.value.code == 0
        assert (
            "the options of 'pretrain' depend on a folder; use --hf_assets_path DIR --help"
            in capsys.readouterr().out
        )

    @pytest.mark.parametrize(
        ("keys", "expected", "logged"),
        [
            ({"torch_dtype": "float32"}, "float32", ""),
            ({"dtype": "bfloat16", "torch_dtype": None}, "bfloat16", ""),
            (
                {"torch_dtype": "float16"},
                "bfloat16",
                "torch_dtype is float16, which is not supported",
            ),
            (
                {"torch_dtype": None},
                "bfloat16",
                "no dtype: --training.mixed_precision_param is bfloat16",
            ),
        ],
    )
    def test_dtype_of_the_model_is_used(self, folder, caplog, keys, expected, logged):
        (folder / "config.json").write_text(json.dumps(SMALL | keys))
        with caplog.at_level(logging.INFO):
            training = parse("--hf_assets_path", folder).config.training
        assert (training.mixed_precision_param, training.dtype) == (expected, "float32")
        assert logged in caplog.text
        assert bool(logged) == ("mixed_precision_param" in caplog.text)

    def test_unusable_folders(self, folder):
        with pytest.raises(UserError, match="elsewhere does not exist"):
            parse("--hf_assets_path", folder / "elsewhere")
        (folder / "config.json").write_text(json.dumps(SMALL | {"torch_dtype": 16}))
        with pytest.raises(UserError, match="torch_dtype is 16, but must be the name of a type"):
            parse("--hf_assets_path", folder)
        for key in ("model_type", "auto_map"):
            wrong = {"model_type": "x"} | {key: [1]}
            (folder / "config.json").write_text(json.dumps(SMALL | wrong))
            with pytest.raises(UserError, match=rf"config.json: {key} is \[1\], but must be an? "):
                parse("--hf_assets_path", folder)
        unknown = {"model_type": "mixtrall", "architectures": ["MixtrallForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(SMALL | unknown))
        with pytest.raises(UserError, match="did you mean .mixtral."):
            parse("--hf_assets_path", folder)
        (folder / "config.json").unlink()
        with pytest.raises(UserError, match="model' has no config.json"):
            parse("--hf_assets_path", folder)

    @pytest.mark.parametrize("code", [{}, {"auto_map": {"AutoModelForCausalLM": "own.Model"}}])
    def test_architectures_decide_if_the_type_is_unknown(self, folder, caplog, code):
        """As in files whose `model_type` is "deepseek_ref" or "kimi_k2"."""
        known = parse("--hf_assets_path", folder).config.model_spec
        (folder / "config.json").write_text(json.dumps(SMALL | code | {"model_type": "llama_ref"}))
        assert parse("--hf_assets_path", folder).config.model_spec == known
        assert "'llama_ref' is unknown; the class in architectures decides: llama" in caplog.text
        other = {"model_type": "cohere_ref", "architectures": ["Cohere2ForCausalLM"]}
        other["sparse_blocks"] = 3
        (folder / "config.json").write_text(json.dumps(SMALL | code | other))
        caplog.clear()
        spec = parse("--hf_assets_path", folder).config.model_spec
        assert "ignoring unknown keys: rms_norm_eps, sparse_blocks" in caplog.text
        assert spec.model.document["model_type"] == "cohere2"

    def test_is_listed(self):
        assert list_module("auto", built_in_modules()["auto"]).configs == [
            "pretrain",
            "scratch",
            "sft",
            "lora",
            "qlora",
            "pretrain_images",
            "sft_images",
            "lora_images",
            "qlora_images",
        ]

    def test_help_shows_values_of_the_folder(self, folder, capsys):
        with pytest.raises(SystemExit):
            parse("--hf_assets_path", folder, "--help")
        assert "2e-05" in capsys.readouterr().out


class TestOwnConfigurations:
    """A user's configuration function may take the folder, but no other parameter."""

    @pytest.fixture
    def module(self, tmp_path):
        package = tmp_path / "own_module"
        package.mkdir()
        (package / "config_registry.py").write_text(
            "from torchtitan.models.llama3.config_registry import llama3_debugmodel\n"
            "def tuned(*, hf_assets_path: str):\n"
            "    config = llama3_debugmodel()\n"
            "    config.dump_folder = f'{hf_assets_path}/out'\n"
            "    return config\n"
            "def helper(size):\n"
            "    return size\n"
        )
        yield package
        for name in [name for name in sys.modules if name.startswith("own_module")]:
            del sys.modules[name]

    def test_function_receives_the_folder(self, module):
        args = ["--module", str(module), "--config", "tuned", "--hf_assets_path", "there"]
        assert ConfigManager().parse_args(args).config.dump_folder == "there/out"

    def test_function_with_another_parameter_is_no_configuration(self, module):
        assert list_module("own_module", module).configs == ["tuned"]
        with pytest.raises(UserError, match="unknown configuration 'helper'"):
            ConfigManager().parse_args(["--module", str(module), "--config", "helper"])


def test_command_ends_with_the_message(tmp_path):
    command = [
        sys.executable,
        "-m",
        "torchtitan.cli.main",
        "train",
        "--module",
        "auto",
        "--config",
        "pretrain",
    ]
    result = run_command(command)
    assert result.returncode == 2
    assert "needs --hf_assets_path" in result.stderr
    assert "Traceback" not in result.stderr


def test_first_loss_equals_the_model_s_loss(assets, tmp_path):
    """The first loss equals the loss of transformers' model on the same tokens."""
    transformers = pytest.importorskip("transformers")
    folder = assets / "stories260K/hf-converted"
    args = [
        "--dataloader.dataset",
        "stories",
        "--dataloader.num_workers",
        0,
        "--dump_folder",
        tmp_path,
    ]
    args += [
        "--training.steps",
        1,
        "--training.seq_len",
        64,
        "--training.mixed_precision_param",
        "float32",
    ]
    trainer = parse(
        "--hf_assets_path", folder, *args, "--metrics.no_enable_tensorboard"
    ).config.build()
    seen: list[Batch] = []
    forward = trainer.forward
    trainer.forward = lambda batch: (seen.append(batch), forward(batch))[1]
    trainer.load_checkpoint()
    trainer.train()
    trainer.close()
    (batch,) = seen
    # the sample is inside one story
    assert batch["attention"].positions_BL.tolist() == [list(range(64))]
    logits = transformers.AutoModelForCausalLM.from_pretrained(folder)(batch["input"]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    # float32 rounding of a mean of 64
    assert json.loads(line)["loss"] == pytest.approx(expected.item(), rel=1e-5)
