"""Models in `torch.save` files, and one message in all commands for unusable model folders."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.test_pretrained import (
    ODD,
    SHAPES,
    assert_identical,
    assert_same_logits,
    reference_of,
)
from torchtitan.cli.main import main
from torchtitan.components.weights import open_source
from torchtitan.config.manager import ConfigManager
from torchtitan.models.pretrained import load_model
from torchtitan.tools.errors import UserError

BIN = "pytorch_model.bin"


def save_pickled(
    reference: "transformers.PreTrainedModel", folder: Path, *, shards: int = 1
) -> None:
    """Save like transformers 4 with `safe_serialization=False`: tied tensors share their
    storage."""
    folder.mkdir(exist_ok=True)
    reference.config.save_pretrained(folder)
    tensors = reference.state_dict()
    if shards == 1:
        torch.save(tensors, folder / BIN)
        return
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"pytorch_model-{shard + 1:05d}-of-{shards:05d}.bin"
        torch.save({name: tensors[name] for name in names[shard::shards]}, folder / file)
        weight_map |= dict.fromkeys(names[shard::shards], file)
    (folder / f"{BIN}.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


class TestPickled:
    @pytest.mark.parametrize("shards", [1, 3])
    @pytest.mark.parametrize("shape", ["1B", "odd"], ids=["tied", "untied"])
    def test_logits_and_tensors_equal_transformers(self, tmp_path, capsys, shape, shards):
        reference = reference_of(SHAPES[shape])
        assert SHAPES[shape].tie_embeddings == (shape == "1B")
        save_pickled(reference, tmp_path / "bin", shards=shards)
        assert_same_logits(load_model(tmp_path / "bin", device="cpu").model, reference)
        assert (
            main(["convert", "--to", "hf", str(tmp_path / "bin"), str(tmp_path / "converted")]) == 0
        )
        reference.save_pretrained(tmp_path / "expected")
        expected = load_file(tmp_path / "expected/model.safetensors")
        assert_identical(load_file(tmp_path / "converted/model.safetensors"), expected)
        capsys.readouterr()
        assert main(["inspect", str(tmp_path / "bin")]) == 0
        assert f"{len(reference.state_dict())} tensors" in capsys.readouterr().out

    def test_run_starts_from_it(self, stories, tmp_path):
        save_pickled(transformers.AutoModelForCausalLM.from_pretrained(stories), tmp_path / "bin")
        shutil.copy(stories / "tokenizer.json", tmp_path / "bin")
        words = [
            "--module",
            "auto",
            "--config",
            "pretrain",
            "--hf_assets_path",
            tmp_path / "bin",
            "--dump_folder",
            tmp_path,
        ]
        words += ["--dataloader.dataset", "stories", "--metrics.no_enable_tensorboard"]
        config = ConfigManager().parse_args([str(word) for word in words]).config
        config.check(world_size=1)
        trainer = config.build()
        trainer.load_checkpoint()
        expected = load_model(stories, device="cpu").model.state_dict()
        assert_identical(trainer.model_parts[0].state_dict(), expected)
        trainer.close()

    def test_only_requested_tensors_are_read(self, tmp_path):
        reference = reference_of(ODD)
        save_pickled(reference, tmp_path)
        part = open_source(tmp_path).read("lm_head.weight", (slice(7, 30), slice(3, 9)))
        assert torch.equal(part, reference.state_dict()["lm_head.weight"][7:30, 3:9])

    def test_safetensors_are_preferred(self, tmp_path):
        save_pickled(reference_of(ODD), tmp_path)
        save_file({"other": torch.zeros(3)}, tmp_path / "model.safetensors")
        assert list(open_source(tmp_path).specs) == ["other"]

    def test_code_is_not_run(self, tmp_path, capsys):
        class Hostile:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "done"),)

        save_pickled(reference_of(ODD), tmp_path)
        torch.save({"lm_head.weight": torch.zeros(2), "other": Hostile()}, tmp_path / BIN)
        for words in (["generate", "--checkpoint"], ["inspect"]):
            assert main([*words, str(tmp_path)]) == (3 if words == ["inspect"] else 2)
            error = capsys.readouterr().err
            assert f"{BIN} contains objects other than tensors" in error
            assert "mkdir" in error
            assert "weights_only" not in error, "torch's advice to load it all the same"
            assert len(error.splitlines()) == 1
        assert not (tmp_path / "done").exists()

    @pytest.mark.parametrize("place", [100, 0.5, 0.999])
    def test_truncated_file(self, tmp_path, place):
        save_pickled(reference_of(ODD), tmp_path)
        content = (tmp_path / BIN).read_bytes()
        (tmp_path / BIN).write_bytes(content[: place if place > 1 else int(place * len(content))])
        with pytest.raises(
            UserError, match=rf"{BIN} cannot be read, it is damaged or was cut short: .*again$"
        ):
            load_model(tmp_path, device="cpu")

    def test_damaged_bytes_are_reported(self, tmp_path):
        """Damage anywhere in the descriptions or offsets of tensors. A changed value is
        undetectable."""
        save_pickled(reference_of(ODD), tmp_path)
        content = (tmp_path / BIN).read_bytes()
        generator = torch.Generator().manual_seed(0)
        refused = 0
        for _ in range(60):
            changed = bytearray(content)
            for place in torch.randint(2500, (3,), generator=generator).tolist():
                changed[place] = (changed[place] + 101) % 256
            (tmp_path / BIN).write_bytes(changed)
            try:
                open_source(tmp_path)
            except UserError:
                refused += 1
        assert refused > 30

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ([torch.zeros(2)], "it must contain a dict of tensors"),
            ({3: torch.zeros(2)}, "it must contain a dict of tensors"),
            ({"weight": 3}, "it must contain a dict of tensors"),
            ({"weight": torch.zeros(3, 4).T}, "weight is not contiguous"),
            ({"weight": torch.eye(2).to_sparse()}, "weight is not contiguous"),
        ],
    )
    def test_unsupported_content(self, tmp_path, content, message):
        torch.save(content, tmp_path / BIN)
        with pytest.raises(UserError, match=message):
            open_source(tmp_path)

    def test_shards_that_do_not_match_the_index(self, tmp_path):
        save_pickled(reference_of(ODD), tmp_path, shards=2)
        index = json.loads((tmp_path / f"{BIN}.index.json").read_text())
        index["weight_map"]["more"] = "pytorch_model-00001-of-00002.bin"
        (tmp_path / f"{BIN}.index.json").write_text(json.dumps(index))
        with pytest.raises(
            UserError,
            match=rf"00001-of-00002\.bin has no tensors .*more, which {BIN}\.index\.json lists",
        ):
            open_source(tmp_path)
        (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
        with pytest.raises(
            UserError, match=r"lists missing files: pytorch_model-00002-of-00002\.bin"
        ):
            open_source(tmp_path)


def messages(folder: Path | str, out: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the messages of train, generate, convert and inspect for an unusable folder, without
    command names."""
    train = [
        "--module",
        "auto",
        "--config",
        "pretrain",
        "--hf_assets_path",
        str(folder),
        "--dump_folder",
        str(out / "run"),
    ]
    found = []
    for words in (
        ["train", *train],
        ["generate", "--checkpoint", str(folder)],
        ["convert", "--to", "dcp", str(folder), str(out / "out")],
        ["inspect", str(folder)],
    ):
        code = main(words)
        (line,) = [
            line
            for line in capsys.readouterr().err.splitlines()
            if not re.search("WARNING|INFO|\\[transformers\\]", line)
        ]
        assert code == 2 or words[0] == "inspect"
        found.append(line.partition(" ERROR " if words[0] == "train" else ": ")[2])
    return found


CONFIGS = [
    *(
        "Qwen--Qwen2.5-7B",
        "Qwen--Qwen3-0.6B",
        "Qwen--Qwen3-30B-A3B",
        "Qwen--Qwen3-8B",
        "deepseek-ai--DeepSeek-V3",
    ),
    *("google--gemma-2-2b-it", "meta-llama--Llama-3.2-1B", "meta-llama--Meta-Llama-3-8B-Instruct"),
    *(
        "meta-llama--Meta-Llama-3.1-405B",
        "meta-llama--Meta-Llama-3.1-8B",
        "mistralai--Mistral-7B-Instruct-v0.3",
    ),
    *("mistralai--Mixtral-8x7B-v0.1", "openai--gpt-oss-20b"),
]


class TestMessages:
    @pytest.fixture(autouse=True)
    def place(self, tmp_path, monkeypatch):
        monkeypatch.setenv("NGPU", "1")
        monkeypatch.chdir(tmp_path)

    @pytest.mark.parametrize("name", CONFIGS)
    def test_real_config_json(self, assets, tmp_path, capsys, name):
        """A model without weights."""
        (tmp_path / "model").mkdir()
        shutil.copy(assets / f"hf-configs/{name}_config.json", tmp_path / "model/config.json")
        first, *others = messages("model", tmp_path, capsys)
        assert others == [first] * 3
        assert first.startswith(
            "model holds no checkpoint: it contains config.json, and has neither .metadata (DCP), "
        )

    def test_unknown_type(self, tmp_path, capsys):
        """Without weights and with weights."""
        (tmp_path / "model").mkdir()
        (tmp_path / "model/config.json").write_text('{"model_type": "mixtrall"}')
        first, *others = messages("model", tmp_path, capsys)
        assert others == [first] * 3
        assert first == (
            "config.json: model_type is 'mixtrall', which neither a family here nor transformers "
            f"{transformers.__version__} knows; did you mean 'mixtral'? --module PATH names a "
            "family of your own"
        )
        save_file({"weight": torch.zeros(3)}, tmp_path / "model/model.safetensors")
        assert messages("model", tmp_path, capsys) == [first] * 4

    @pytest.mark.parametrize("weights", [True, False])
    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            (
                {"quantization_config": {"quant_method": "aqlm"}, "is_causal": False},
                "config.json: quantization_config has 'aqlm', and only weights of fp8, fbgemm_fp8, "
                "mxfp4, gptq, awq, bitsandbytes, compressed-tensors, modelopt can be loaded; use the model before "
                "quantization",
            ),
            (
                {"is_causal": False, "hidden_size": 0},
                "config.json: is_causal is False, which this family does not support (only True); "
                "--module transformers may support it",
            ),
        ],
        ids=["quantized", "detail"],
    )
    def test_config_json_with_several_faults(self, tmp_path, capsys, changes, expected, weights):
        reference = reference_of(ODD)
        save_pickled(reference, tmp_path / "model")
        if not weights:
            (tmp_path / "model" / BIN).unlink()
        file = tmp_path / "model/config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        assert messages("model", tmp_path, capsys) == [expected] * 4

    @pytest.mark.parametrize(
        ("path", "expected"),
        [
            (
                "meta-llama/Llama-3.1-8B",
                "meta-llama/Llama-3.1-8B does not exist; if it is a model on the Hugging Face Hub, "
                "run torchtitan download meta-llama/Llama-3.1-8B, and use ./assets/hf/Llama-3.1-8B",
            ),
            (
                "someone/fetched",
                "someone/fetched does not exist, but is the name of a downloaded model; use "
                "./assets/hf/fetched",
            ),
            (
                "./assets/hf/Llama-3.1-8B",
                "assets/hf/Llama-3.1-8B does not exist; to download the model, run: torchtitan "
                "download meta-llama/Llama-3.1-8B",
            ),
            (
                "elsewhere/assets/hf/Model",
                "elsewhere/assets/hf/Model does not exist; to download the model, run: torchtitan "
                "download OWNER/Model --dest elsewhere/assets/hf/Model",
            ),
            (
                "here/model",
                "here/model does not exist; use the folder that contains the model's files",
            ),
            (
                "no/such/place",
                "no/such/place does not exist; use the folder that contains the model's files",
            ),
            ("here/file", "here/file is not a folder but a file; use the folder that contains it"),
        ],
    )
    def test_missing_folder(self, tmp_path, capsys, path, expected):
        (tmp_path / "here").mkdir()
        (tmp_path / "here/file").touch()
        (tmp_path / "assets/hf/fetched").mkdir(parents=True)
        assert messages(path, tmp_path, capsys) == [expected] * 4

    @pytest.mark.parametrize("config", ["8b", "8b_sft", "1b", "70b", "8b_lora"])
    @pytest.mark.parametrize("command", [["train"], ["data", "inspect"]])
    def test_default_folder(self, tmp_path, capsys, config, command):
        """`torchtitan download` with the name in the message would create the folder."""
        words = [
            "--config",
            config,
            "--dump_folder",
            str(tmp_path),
            "--dataloader.dataset",
            "stories",
        ]
        assert main([*command, *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        name = {"1b": "Llama-3.2-1B", "70b": "Llama-3.1-70B", "8b": "Llama-3.1-8B"}.get(
            config, "Llama-3.1-8B-Instruct"
        )
        expected = (
            f"assets/hf/{name} does not exist; to download the model, run: torchtitan download "
            f"meta-llama/{name}"
        )
        assert line.endswith(expected)
