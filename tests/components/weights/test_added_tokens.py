"""Tokens added to a tokenizer: their ids, their rows in a model, and their place in checkpoints."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pretrained import FLOAT32, LAST_IN_HF, from_folder, make_pretrained, read_weights
from tests.processes import run_processes
from tests.training import tiny_config, train
from torchtitan.cli.convert import convert
from torchtitan.components.chat_template import (
    ChatTemplate,
    load_chat_template,
    resolve_chat_template,
)
from torchtitan.components.generation import stop_ids
from torchtitan.components.tokenizer import EMBEDDED_TOKENIZER, PretrainedTokenizer
from torchtitan.components.weights import ResizedEmbedding, TensorSource
from torchtitan.components.weights.assets import asset_folder, chat_assets
from torchtitan.components.weights.pretrained import internal_source
from torchtitan.models.pretrained import load_model
from torchtitan.protocols.tensor_source import Slices, TensorSpec, full_slices
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer

TURN_TOKENS = ["<|im_start|>", "<|im_end|>"]
TURN = "<|im_start|>user\nA cat.<|im_end|>\n"
ADDED = {"tokenizer__added_tokens": TURN_TOKENS}
MESSAGES = [{"role": "user", "content": "Who ran?"}, {"role": "assistant", "content": "Tim ran."}]
N_EMBEDDED = 2048
NEW = range(N_EMBEDDED, N_EMBEDDED + 2)


def make_tokenizer(folder: Path | str = "", *tokens: str) -> PretrainedTokenizer:
    return PretrainedTokenizer.Config(added_tokens=list(tokens or TURN_TOKENS)).build(path=folder)


class TestTokenizer:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "name", ["gpt2-tokenizer", "mistral-v0.3-tokenizer", "stories260K/hf-converted", ""]
    )
    def test_equals_transformers(self, assets, name):
        from transformers import PreTrainedTokenizerFast

        folder = assets / name if name else EMBEDDED_TOKENIZER
        reference = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        n_before = len(reference)
        reference.add_special_tokens({"additional_special_tokens": TURN_TOKENS})
        tokenizer = make_tokenizer(folder)
        assert tokenizer.vocab_size == len(reference) == n_before + 2
        assert tokenizer.n_added == 2
        ids = tokenizer.encode(TURN, add_bos=False, allow_special=True)
        assert ids == reference(TURN, add_special_tokens=False).input_ids
        assert ids[0] == n_before and n_before + 1 in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == reference.decode(
            ids, skip_special_tokens=True
        )
        assert {n_before, n_before + 1} <= tokenizer.special_ids

    def test_ordinary_text_does_not_become_special(self):
        ids = make_tokenizer().encode(TURN, add_bos=False)
        assert max(ids) < N_EMBEDDED
        assert make_tokenizer().decode(ids) == TURN

    def test_an_existing_token_keeps_its_id(self):
        tokenizer = make_tokenizer("", "<|pad|>", "<|im_end|>", "<|im_end|>")
        assert tokenizer.n_added == 1
        assert tokenizer.encode("<|pad|><|im_end|>", add_bos=False, allow_special=True) == [
            2,
            N_EMBEDDED,
        ]

    def test_a_word_of_the_vocabulary_becomes_special(self):
        plain, tokenizer = PretrainedTokenizer.Config().build(), make_tokenizer("", "er")
        (word,) = plain.encode("er", add_bos=False)
        assert tokenizer.n_added == 0 and tokenizer.vocab_size == N_EMBEDDED
        assert word in tokenizer.encode("other", add_bos=False, allow_special=True)
        assert word not in tokenizer.encode("other", add_bos=False)

    def test_an_existing_special_token_changes_nothing(self):
        plain, tokenizer = PretrainedTokenizer.Config().build(), make_tokenizer("", "<|pad|>")
        assert tokenizer.fingerprint == plain.fingerprint
        assert tokenizer.changed_files == plain.changed_files == {}

    def test_fingerprint_and_pickling(self):
        plain, tokenizer = PretrainedTokenizer.Config().build(), make_tokenizer()
        assert tokenizer.fingerprint not in (
            plain.fingerprint,
            make_tokenizer("", "<|im_end|>").fingerprint,
        )
        copied = pickle.loads(pickle.dumps(tokenizer))
        assert copied.encode(TURN, allow_special=True) == tokenizer.encode(TURN, allow_special=True)
        assert copied.changed_files == tokenizer.changed_files

    def test_the_changed_file_has_the_added_tokens(self, tmp_path):
        tokenizer = make_tokenizer()
        (tmp_path / "tokenizer.json").write_bytes(tokenizer.changed_files["tokenizer.json"])
        again = PretrainedTokenizer.Config().build(path=tmp_path)
        assert again.vocab_size == tokenizer.vocab_size and again.n_added == 0
        assert again.encode(TURN, allow_special=True) == tokenizer.encode(TURN, allow_special=True)

    def test_ids_with_gaps_are_rejected(self, tmp_path):
        document = json.loads((EMBEDDED_TOKENIZER / "tokenizer.json").read_text())
        document["model"]["vocab"]["far"] = 5000
        (tmp_path / "tokenizer.json").write_text(json.dumps(document))
        with pytest.raises(UserError, match="unused ids"):
            make_tokenizer(tmp_path)

    def test_a_blank_token_is_rejected(self):
        with pytest.raises(
            UserError, match=r"--tokenizer.added_tokens contains ' '; tokens must not be blank"
        ):
            make_tokenizer("", "<|im_start|>", " ")

    def test_tiktoken_cannot_be_extended(self, assets):
        folder = assets / "llama3-tokenizer"
        assert make_tokenizer(folder, "<|eot_id|>").n_added == 0
        with pytest.raises(
            UserError,
            match=r"cannot add <\|im_start\|>, <\|im_end\|> to .*, a file in tiktoken format",
        ):
            make_tokenizer(folder)


class Recorded(TensorSource):
    """A matrix that records which rows were read."""

    def __init__(self, tensor: Tensor):
        self.tensor, self.read_rows = tensor, set[int]()
        self.specs = {"w": TensorSpec.of(tensor)}

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        slices = slices or full_slices(self.tensor.shape)
        self.read_rows |= set(range(slices[0].start, slices[0].stop))
        return self.tensor[slices]


class TestGrownVocabulary:
    """20 rows in use and 3 added ones; the source has `n_padding` rows after the 20."""

    def grown(
        self, dtype: torch.dtype = torch.float32, n_padding: int = 0
    ) -> tuple[Recorded, ResizedEmbedding, Tensor]:
        torch.manual_seed(0)
        source = Recorded(torch.randn(20 + n_padding, 6, dtype=dtype))
        mean = source.tensor[:20].double().mean(dim=0).to(dtype)
        expected = torch.cat([source.tensor[:20], mean.expand(3, 6), source.tensor[23:]])
        return source, ResizedEmbedding(source, ["w"], range(20, 23)), expected

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_new_rows_are_the_mean(self, dtype):
        _, grown, expected = self.grown(dtype)
        assert grown.specs["w"].shape == (23, 6)
        assert torch.equal(grown.read("w"), expected)

    @pytest.mark.parametrize("n_padding", [0, 2, 3, 5])
    def test_slices_equal_slices_of_the_whole(self, n_padding):
        _, grown, expected = self.grown(n_padding=n_padding)
        assert grown.specs["w"].shape == expected.shape
        for first in range(len(expected) + 1):
            for end in range(first, len(expected) + 1):
                part = (slice(first, end), slice(2, 5))
                assert torch.equal(grown.read("w", part), expected[part]), part

    def test_existing_rows_are_read_alone(self):
        source, grown, _ = self.grown()
        grown.read("w", (slice(5, 12), slice(0, 6)))
        assert source.read_rows == set(range(5, 12))

    def test_a_tensor_that_lacks_more_rows_is_not_resized(self):
        source = Recorded(torch.randn(20, 6))
        assert ResizedEmbedding(source, ["w"], range(21, 23)).specs == source.specs


def with_mean_rows(tensor: Tensor, n: int) -> Tensor:
    """Return `tensor` with `n` more rows, each the mean of its rows."""
    return torch.cat([tensor, tensor.double().mean(dim=0).to(tensor.dtype).expand(n, -1)])


class TestModel:
    """Runs with learning rate 0: they end with their initial weights."""

    FROZEN = {"optimizer__lr": 0, "optimizer__weight_decay": 0, "training__steps": 1}

    @pytest.mark.slow
    @pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
    def test_grows_and_is_exported(self, tmp_path, tied):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        source = make_pretrained(tmp_path / "source", tie_word_embeddings=tied)
        options = {**FLOAT32, **from_folder(source), **LAST_IN_HF, **ADDED, **self.FROZEN}
        train(tmp_path / "run", **options, model__vocab_size=N_EMBEDDED, model__tie_embeddings=tied)
        exported = tmp_path / "run" / "checkpoint" / "step-1"
        before, after = read_weights(source), read_weights(exported)
        for name, tensor in before.items():
            is_grown = name in ("model.embed_tokens.weight", "lm_head.weight")
            assert torch.equal(after[name], with_mean_rows(tensor, 2) if is_grown else tensor), name
        model, tokenizer = (
            AutoModelForCausalLM.from_pretrained(exported),
            AutoTokenizer.from_pretrained(exported),
        )
        assert model.config.vocab_size == len(tokenizer) == N_EMBEDDED + 2
        ids = tokenizer(TURN, add_special_tokens=False).input_ids
        assert ids == make_tokenizer().encode(TURN, add_bos=False, allow_special=True)
        # Logits of known tokens are unchanged.
        known = torch.tensor([[token for token in ids if token < N_EMBEDDED]])
        with torch.no_grad():
            logits, former = (
                m(known).logits for m in (model, AutoModelForCausalLM.from_pretrained(source))
            )
        # A matrix product of another width may sum in another order.
        torch.testing.assert_close(logits[..., :N_EMBEDDED], former, rtol=1e-5, atol=1e-5)

    @pytest.mark.slow
    def test_from_a_native_checkpoint(self, tmp_path):
        train(tmp_path / "first", **FLOAT32, training__steps=1, checkpoint__enable=True)
        first = tmp_path / "first" / "checkpoint" / "step-1"
        trainer = train(
            tmp_path / "run",
            **FLOAT32,
            **ADDED,
            **self.FROZEN,
            checkpoint__initial_load_path=first,
            checkpoint__enable=True,
        )
        before = load_model(first, device="cpu").model.state_dict()
        after = trainer.model_parts[0].state_dict()
        for name, tensor in before.items():
            is_grown = name in ("tok_embeddings.weight", "head.output.weight")
            assert torch.equal(after[name], with_mean_rows(tensor, 2) if is_grown else tensor), name

    def test_a_native_checkpoint_with_the_tokens_is_loaded_unchanged(self, tmp_path):
        first = train(
            tmp_path / "first", **FLOAT32, **ADDED, training__steps=1, checkpoint__enable=True
        )
        start = {"checkpoint__initial_load_path": tmp_path / "first" / "checkpoint" / "step-1"}
        trainer = train(tmp_path / "run", **FLOAT32, **ADDED, **self.FROZEN, **start)
        before, after = (run.model_parts[0].state_dict() for run in (first, trainer))
        assert all(torch.equal(after[name], before[name]) for name in before)

    def test_from_meta_format(self, tmp_path):
        source = make_pretrained(tmp_path / "source")
        assert convert([str(source), str(tmp_path / "meta"), "--to", "meta"]) == 0
        spec = tiny_config(tmp_path, model__vocab_size=N_EMBEDDED + 2).model_spec
        one, other = (
            internal_source(path, spec, added=NEW) for path in (source, tmp_path / "meta")
        )
        assert one.specs == other.specs
        assert all(torch.equal(one.read(name), other.read(name)) for name in one.specs)

    def test_resuming_is_exact(self, tmp_path):
        options = {**FLOAT32, **ADDED, "checkpoint__enable": True, "checkpoint__interval": 2}
        straight = train(tmp_path / "straight", **options)
        train(tmp_path / "run", **options, training__steps=2, lr_scheduler__total_steps=4)
        resumed = train(tmp_path / "run", **options)
        ours, theirs = (trainer.model_parts[0].state_dict() for trainer in (straight, resumed))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    def test_a_wrong_number_of_rows_is_rejected(self, tmp_path):
        source = make_pretrained(tmp_path / "source")
        for rows, n_added, n_known in (
            (2050, 0, 2050),
            (2050, 1, 2049),
            (2051, 2, 2048),
            (2051, 2, 2049),
            (2047, 2, 2045),
        ):
            spec = tiny_config(tmp_path, model__vocab_size=rows).model_spec
            with pytest.raises(
                UserError,
                match=rf"model.embed_tokens.weight has shape \[2048, 64\] instead of \[{rows}, "
                r"64\]",
            ):
                internal_source(source, spec, added=range(n_known, n_known + n_added))

    def test_a_vocabulary_smaller_than_the_tokenizer_is_rejected(self, tmp_path):
        with pytest.raises(
            UserError, match="has 2050 tokens, and the model's vocabulary only 2000"
        ):
            train(tmp_path, **FLOAT32, **ADDED, model__vocab_size=2000)

    def test_spare_rows_are_used(self, tmp_path):
        config = tiny_config(tmp_path, **ADDED, model__vocab_size=2100)
        assert config.resolve(config.tokenizer.build()).model_spec.model.vocab_size == 2100

    @pytest.mark.parametrize("n_saved", [2049, 2050, 2056])
    def test_padding_rows_become_the_mean(self, tmp_path, n_saved):
        """Published vocabularies have unused rows, which were not trained."""
        source = make_pretrained(tmp_path / "source", vocab_size=n_saved)
        spec = tiny_config(tmp_path, model__vocab_size=max(n_saved, NEW.stop)).model_spec
        saved, grown = (
            read_weights(source)["lm_head.weight"],
            internal_source(source, spec, added=NEW),
        )
        for name in ("tok_embeddings.weight", "head.output.weight"):
            assert grown.specs[name].shape == (max(n_saved, NEW.stop), 64)
        expected = torch.cat([with_mean_rows(saved[:N_EMBEDDED], 2), saved[NEW.stop :]])
        assert torch.equal(grown.read("head.output.weight"), expected)

    def test_rows_of_tokens_in_the_checkpoint_are_kept(self, tmp_path):
        """The checkpoint of an earlier run with the same tokens, with a tokenizer folder that lacks
        them."""
        source = make_pretrained(tmp_path / "source", vocab_size=2056)
        (source / "tokenizer.json").write_bytes(
            make_tokenizer("", TURN_TOKENS[0]).changed_files["tokenizer.json"]
        )
        spec = tiny_config(tmp_path, model__vocab_size=2056).model_spec
        saved = read_weights(source)["lm_head.weight"]
        expected = torch.cat([with_mean_rows(saved[: NEW.start + 1], 1), saved[NEW.stop :]])
        assert torch.equal(
            internal_source(source, spec, added=NEW).read("head.output.weight"), expected
        )
        (source / "tokenizer.json").write_bytes(make_tokenizer().changed_files["tokenizer.json"])
        assert torch.equal(
            internal_source(source, spec, added=NEW).read("head.output.weight"), saved
        )

    @pytest.mark.slow
    def test_layouts(self, tmp_path):
        source = make_pretrained(tmp_path / "source")
        options = {**FLOAT32, **from_folder(source), **LAST_IN_HF, **ADDED, **self.FROZEN}
        run_processes(run_layouts, 2, tmp_path, {**options, "model__vocab_size": N_EMBEDDED})
        before = read_weights(source)
        for layout in LAYOUTS:
            after = read_weights(tmp_path / layout / "checkpoint" / "step-1")
            for name in ("model.embed_tokens.weight", "lm_head.weight"):
                assert torch.equal(after[name], with_mean_rows(before[name], 2)), (layout, name)


LAYOUTS = {
    "fsdp": {},
    "tensor": {"parallelism__tensor_parallel_degree": 2},
    "pipeline": {"parallelism__pipeline_parallel_degree": 2},
}


def run_layouts(folder: Path, options: dict[str, Any]) -> None:
    for name, layout in LAYOUTS.items():
        train(folder / name, **options, **layout)


class ChatTrainer(Trainer):
    """Declares that its data are conversations in ChatML."""

    def build_dataloader(self, config, *, epochs):
        loader = super().build_dataloader(config, epochs=epochs)
        loader.assets = lambda: chat_assets(
            self.tokenizer, resolve_chat_template("chatml", [], self.tokenizer)
        )
        return loader


class TestAssets:
    def test_checkpoints_have_template_and_tokens(self, tmp_path):
        """Native, exported, and converted checkpoints."""
        # step 3 is full, step 4 exported
        train(tmp_path, trainer_class=ChatTrainer, **FLOAT32, **ADDED, **LAST_IN_HF)
        native, exported, converted = (
            tmp_path / "checkpoint" / "step-3",
            tmp_path / "checkpoint" / "step-4",
            tmp_path / "c",
        )
        assert convert([str(native), str(converted), "--to", "hf"]) == 0
        for folder in (native, exported, converted):
            self.check(folder)

    def check(self, folder: Path) -> None:
        from transformers import AutoTokenizer, GenerationConfig

        files = asset_folder(folder)
        tokenizer, template = (
            PretrainedTokenizer.Config().build(path=files),
            load_chat_template(files),
        )
        text = template.render(MESSAGES, add_generation_prompt=False)
        ids = tokenizer.encode(text, add_bos=False, allow_special=True)
        end = tokenizer.id_of("<|im_end|>")
        assert end in ids and end in stop_ids(tokenizer, files)
        theirs = AutoTokenizer.from_pretrained(files)
        assert theirs.apply_chat_template(MESSAGES, tokenize=False) == text
        assert theirs.apply_chat_template(MESSAGES, return_dict=False) == ids
        assert theirs.bos_token_id == tokenizer.bos_id and theirs.eos_token_id == tokenizer.eos_id
        assert GenerationConfig.from_pretrained(files).eos_token_id == [tokenizer.eos_id, end]

    def test_complete_files_are_kept(self, tmp_path):
        (tmp_path / "generation_config.json").write_text(
            json.dumps({"eos_token_id": [1, 2], "temperature": 0.6})
        )
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(EMBEDDED_TOKENIZER / name, tmp_path)
        template = "{{ bos_token }}{% for turn in messages %}{{ turn.content }}END{% endfor %}"
        (tmp_path / "chat.jinja").write_text(template.replace("END", "<|pad|>"))
        tokenizer = make_tokenizer(tmp_path)
        pad_template = resolve_chat_template(str(tmp_path / "chat.jinja"), [tmp_path], tokenizer)
        assert chat_assets(tokenizer, pad_template) == {"chat_template.jinja": pad_template.source}
        (tmp_path / "chat.jinja").write_text(template.replace("END", "<|im_end|>"))
        end_template = resolve_chat_template(str(tmp_path / "chat.jinja"), [tmp_path], tokenizer)
        changed = json.loads(chat_assets(tokenizer, end_template)["generation_config.json"])
        assert changed == {
            "bos_token_id": 0,
            "eos_token_id": [1, 2, N_EMBEDDED + 1],
            "temperature": 0.6,
        }

    def test_a_turn_that_ends_with_text_adds_no_stop_token(self):
        template = ChatTemplate("{% for turn in messages %}{{ turn.content }}###{% endfor %}")
        assert chat_assets(make_tokenizer(), template).keys() == {"chat_template.jinja"}

    def test_special_tokens_from_config_json(self, tmp_path):
        """A custom template writes them, and transformers looks for them in
        tokenizer_config.json."""
        from transformers import AutoTokenizer

        shutil.copy(EMBEDDED_TOKENIZER / "tokenizer.json", tmp_path)
        (tmp_path / "config.json").write_text(
            json.dumps({"bos_token_id": 2, "eos_token_id": 1, "model_type": "llama"})
        )
        source = (
            "{{ bos_token }}{% for turn in messages %}{{ turn.content + eos_token }}{% endfor %}"
        )
        (tmp_path / "chat.jinja").write_text(source)
        tokenizer = make_tokenizer(tmp_path)
        template = resolve_chat_template(str(tmp_path / "chat.jinja"), [tmp_path], tokenizer)
        for name, text in chat_assets(tokenizer, template).items():
            (tmp_path / name).write_text(text)
        text = template.render(MESSAGES, add_generation_prompt=False)
        assert text == "<|pad|>Who ran?<|end_of_text|>Tim ran.<|end_of_text|>"
        assert (
            AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(MESSAGES, tokenize=False)
            == text
        )
