"""Fine-tuning on conversations, from a Hugging Face folder to an export that transformers opens."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pretrained import make_pretrained
from tests.training import flags, read_metrics, read_validation, run
from torchtitan.components.tokenizer import EMBEDDED_TOKENIZER
from torchtitan.config.manager import ConfigManager
from torchtitan.models.llama3.config_registry import llama3_8b_sft
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer

TEMPLATE = (
    "{% for message in messages %}{{ '<|pad|>' + message['role'] + ':\n' }}{% if message['role'] "
    "== 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% else %}{{ "
    "message['content'] }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|pad|>assistant:\n' }}{% endif %}"
)
"""A custom template that marks the assistant's text."""

ROWS = [
    [("user", "What did Tim see?"), ("assistant", "Tim saw a big red ball.")],
    [
        ("system", "Be kind."),
        ("user", "Who is Lily?"),
        ("assistant", "A girl."),
        ("user", "And Max?"),
        ("assistant", "A dog."),
    ],
    [("user", "Say yes."), ("assistant", "Yes.")],
]
CHATS = [[{"role": role, "content": text} for role, text in row] for row in ROWS]


def run_named(config_name: str, folder: Path, **options: Any) -> Trainer:
    """Train `CONFIG=config_name` to its end in this process; return the trainer."""
    cache = {} if "dataloader__cache_dir" in options else {"dataloader.cache_dir": folder / "cache"}
    words = flags(
        {key.replace("__", "."): value for key, value in options.items()}
        | cache
        | {"dump_folder": folder}
    )
    config = ConfigManager().parse_args(["--config", config_name, *words]).config
    config.check(world_size=1)
    return run(config)


@pytest.fixture
def pretrained(tmp_path) -> Path:
    """Tiny Llama, saved by transformers with the embedded tokenizer and a custom chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TOKENIZER)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "hf")
    return make_pretrained(tmp_path / "hf", bos_token_id=0, eos_token_id=1)


@pytest.fixture
def chat_file(tmp_path) -> Path:
    path = tmp_path / "my.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    return path


def loss_of_transformers(folder: Path, chats: list[list[dict[str, str]]]) -> float:
    """Mean loss of the folder's model over the tokens that its template marks."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForCausalLM.from_pretrained(folder),
    )
    total, n_tokens = 0.0, 0
    for chat in chats:
        encoded = tokenizer.apply_chat_template(
            chat, return_assistant_tokens_mask=True, return_dict=True
        )
        ids, mask = (
            torch.tensor(encoded["input_ids"]),
            torch.tensor(encoded["assistant_masks"]).bool(),
        )
        labels = torch.where(mask, ids, -100)
        with torch.no_grad():
            loss = model(ids[None], labels=labels[None]).loss.item()
        total += loss * int(mask[1:].sum())
        n_tokens += int(mask[1:].sum())
    return total / n_tokens


SHORT = {
    "training__epochs": 3,
    "training__mixed_precision_param": "float32",
    "metrics__log_freq": 1,
}


class TestFromHuggingFace:
    """`MODULE=auto CONFIG=sft --hf_assets_path DIR --dataloader.dataset my.jsonl`."""

    @pytest.mark.slow
    def test_to_hugging_face(self, tmp_path, pretrained, chat_file):
        from transformers import AutoTokenizer, GenerationConfig

        run_named(
            "sft",
            tmp_path / "run",
            module="auto",
            hf_assets_path=pretrained,
            dataloader__dataset=[chat_file],
            **SHORT,
        )
        ((_, first), *_, (last_step, last)) = read_metrics(tmp_path / "run", "loss")
        assert last_step == 3  # the rows fit into one window
        # One packed window against single conversations: float32 sums in another order.
        assert first == pytest.approx(loss_of_transformers(pretrained, CHATS), rel=1e-5)
        assert last < first
        exported = tmp_path / "run" / "checkpoint" / "step-3"
        assert loss_of_transformers(exported, CHATS) < first
        tokenizer, own = (
            AutoTokenizer.from_pretrained(folder) for folder in (exported, pretrained)
        )
        assert tokenizer.apply_chat_template(CHATS[1]) == own.apply_chat_template(CHATS[1])
        assert GenerationConfig.from_pretrained(exported).eos_token_id == 1

    @pytest.mark.slow
    def test_with_added_tokens_and_template(self, tmp_path, pretrained, chat_file):
        from transformers import AutoTokenizer, GenerationConfig

        added = ["<|im_start|>", "<|im_end|>"]
        trainer = run_named(
            "sft",
            tmp_path / "run",
            module="auto",
            hf_assets_path=pretrained,
            dataloader__dataset=[chat_file],
            dataloader__chat_template="chatml",
            tokenizer__added_tokens=added,
            **SHORT,
        )
        assert trainer.config.model_spec.model.vocab_size == 2050
        exported = tmp_path / "run" / "checkpoint" / "step-3"
        # the vocabulary of the exported model contains all ids
        loss_of_transformers(exported, CHATS)
        tokenizer = AutoTokenizer.from_pretrained(exported)
        assert tokenizer.convert_tokens_to_ids(added) == [2048, 2049]
        assert "<|im_start|>user\nSay yes.<|im_end|>" in tokenizer.apply_chat_template(
            CHATS[2], tokenize=False
        )
        assert GenerationConfig.from_pretrained(exported).eos_token_id == [1, 2049]

    def test_tokens_missing_from_the_vocabulary_are_named(self, tmp_path, pretrained, chat_file):
        with pytest.raises(UserError, match=r"<\|im_end\|>.*--tokenizer\.added_tokens"):
            run_named(
                "sft",
                tmp_path / "run",
                module="auto",
                hf_assets_path=pretrained,
                dataloader__dataset=[chat_file],
                dataloader__chat_template="chatml",
            )

    def test_dataset_is_required(self, tmp_path, pretrained):
        with pytest.raises(UserError, match=r"--dataloader\.dataset"):
            run_named("sft", tmp_path / "run", module="auto", hf_assets_path=pretrained)

    def test_8b_model(self):
        config = llama3_8b_sft()
        assert (
            config.checkpoint.initial_load_path
            == config.hf_assets_path
            == "./assets/hf/Llama-3.1-8B-Instruct"
        )
        assert config.checkpoint.initial_load_in_hf and config.checkpoint.last_save_in_hf
        config.dataloader.dataset = ["my.jsonl"]
        config.dataloader.validate()

    @pytest.mark.long
    def test_real_model_learns(self, tmp_path, assets):
        """stories260K on the built-in conversations: the validation loss falls."""
        folder = assets / "stories260K" / "hf-converted"
        run_named(
            "sft",
            tmp_path,
            module="auto",
            hf_assets_path=folder,
            dataloader__dataset=["chats"],
            dataloader__chat_template="chatml",
            tokenizer__added_tokens=["<|im_start|>", "<|im_end|>"],
            training__steps=20,
            training__local_batch_size=8,
            activation_checkpoint__mode="none",
            optimizer__lr=2e-3,
            validator__enable=True,
            validator__at_start=True,
            validator__steps=4,
            **SHORT | {"training__epochs": None},
        )
        (_, before), *_, (_, after) = read_validation(tmp_path)
        assert after < before - 0.5


class TestDebugModel:
    """`CONFIG=debugmodel_sft`, offline."""

    @pytest.mark.slow
    def test_export_has_the_chatml_template(self, tmp_path):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        options = {
            "checkpoint__enable": True,
            "checkpoint__last_save_in_hf": True,
            "validator__enable": False,
        }
        options |= {
            "model__dim": 64,
            "model__ffn_dim": 128,
            "model__n_layers": 2,
            "training__steps": 2,
        }
        trainer = run_named("debugmodel_sft", tmp_path, **options)
        exported = tmp_path / "checkpoint" / "step-2"
        tokenizer = AutoTokenizer.from_pretrained(exported)
        ids = tokenizer.apply_chat_template(CHATS[0], return_dict=False)
        assert (
            ids
            == tokenizer(
                trainer.dataloader.template.render(CHATS[0], add_generation_prompt=False)
            ).input_ids[1:]
        )
        assert {2048, 2049} <= set(ids)
        assert AutoModelForCausalLM.from_pretrained(exported).config.vocab_size == 2050

    @pytest.mark.long
    def test_learns(self, tmp_path):
        run_named("debugmodel_sft", tmp_path, validator__at_start=True)
        (_, before), *_, (_, after) = read_validation(tmp_path)
        assert before == pytest.approx(torch.tensor(2050.0).log().item(), abs=0.3)
        assert after < 2.5
