"""Recipes: a configuration file for each often used model and each method that fits it, on the
smallest cards that hold it.

`torchtitan new --recipe MODEL/METHOD` writes one; `python -m tests.recipes` writes all to
`recipes/`. Tests compare the memory of each with its cards.
"""

import shlex
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torchtitan.tools.errors import UserError, suggest

_SEQ_LEN = 2048


class Model(NamedTuple):
    """A model on the Hugging Face Hub, and its size among ours."""

    title: str
    repository: str
    family: str
    flavor: str
    cards: Mapping[str, str]
    """Method → number and kind of cards, such as `1 rtx4090`, a device of docs/foresight.md."""
    lrs: Mapping[str, str] = MappingProxyType({})
    """Method → learning rate, if not the method's."""
    reasoning: str = ""
    """Comment on the column that turns off or shortens the reasoning before an answer. Empty: the
    model does not reason first."""

    @property
    def folder(self) -> str:
        return f"assets/hf/{self.repository.rpartition('/')[2]}"


class Method(NamedTuple):
    """A way to train a model."""

    title: str
    module: str
    config: str
    data: str
    """File of the user."""
    rows: str
    """Contents of that file, and the page that describes its format."""
    lr: str
    global_batch_size: int
    of_batch: str
    more: str = ""
    """Further sections."""


_LORA = """
model_converters:
  {name}:
    rank: 16  # more: larger adapters, closer to training all weights
    alpha: 32  # the adapters count alpha / rank times; keep twice the rank
"""

_GRPO = """
rewards: [number]  # or math, or your own function: --rewards my_rewards.py:score
rollout:
  group_size: 8  # answers to each prompt, which are compared with each other
  max_new_tokens: {answer}
  max_rows: 32  # answers that a card writes at once; more needs more memory
"""

_ANSWER = "512  # of an answer; prompt and answer fit in seq_len"
_REASONED = """1536  # of reasoning and answer; the prompt and both fit in seq_len
  # {reasoning}"""

_ROWS = "Rows {} by the column chat_template_kwargs:"
_THINKING = f'{_ROWS.format("turn reasoning off")} {{"enable_thinking": false}}'
_EFFORT = f'{_ROWS.format("shorten reasoning")} {{"reasoning_effort": "low"}}'

_CONVERSATIONS = ("my.jsonl", "conversations or instructions (docs/fine_tuning.md)")
_PAIRS = (
    "pairs.jsonl",
    "prompts, each with a chosen and a rejected answer (docs/post_training.md)",
)
_PROMPTS = ("prompts.jsonl", "prompts, with the column `answer` (docs/post_training.md)")
_WINDOWS = "windows of a step; the cards accumulate, so more needs no memory"
_PAIRS_OF_STEP = "windows of pairs in a step; the cards accumulate, so more needs no memory"
_PROMPTS_OF_STEP = "prompts of a step, each with group_size answers"

_ADAPTERS = _LORA.format(name="lora")
METHODS = {
    "full": Method("all weights", "auto", "sft", *_CONVERSATIONS, "2.0e-5", 16, _WINDOWS),
    "lora": Method("LoRA", "auto", "lora", *_CONVERSATIONS, "2.0e-4", 16, _WINDOWS, _ADAPTERS),
    "qlora": Method(
        *(
            "QLoRA (base weights in few bits: as published, otherwise NF4)",
            "auto",
            "qlora",
            *_CONVERSATIONS,
            "2.0e-4",
            16,
            _WINDOWS,
        ),
        more=_LORA.format(name="qlora"),
    ),
    "dpo": Method(
        *("DPO of adapters", "preference", "dpo_lora", *_PAIRS, "5.0e-6", 16, _PAIRS_OF_STEP),
        more=f"{_ADAPTERS}\nloss:\n  beta: 0.1  # smaller: further from the original model\n",
    ),
    "grpo": Method(
        *("GRPO of adapters", "rl", "grpo_lora", *_PROMPTS, "1.0e-5", 8, _PROMPTS_OF_STEP),
        more=f"{_ADAPTERS}{_GRPO}",
    ),
}


def _cards(full: str, lora: str, qlora: str = "", *, grpo: str = "") -> dict[str, str]:
    """Return the cards by method. Without `qlora`, most weights are experts that are published in
    bfloat16: experts become NF4 with `base nf4` only."""
    cards = {"full": full, "lora": lora, "qlora": qlora, "dpo": lora, "grpo": grpo or lora}
    return {method: card for method, card in cards.items() if card}


_LARGE = {"full": "1.0e-5"}
"""Rates of models from 12 billion parameters, and of experts, which larger steps unsettle."""

_4090, _L40S = "1 rtx4090", "1 l40s"
_3B = _cards("1 h100", _4090, _4090, grpo=_L40S)
_8B = _cards("4 h100", _L40S, _4090)
MODELS = {
    "gemma-3-4b": Model(
        "Gemma 3 4B", "google/gemma-3-4b-it", "gemma", "3-4B", _cards("2 h100", _L40S, _4090)
    ),
    "gemma-3-12b": Model(
        *("Gemma 3 12B", "google/gemma-3-12b-it", "gemma", "3-12B"),
        _cards("8 h100", "1 h100", "1 rtx5090"),
        lrs=_LARGE,
    ),
    "gpt-oss-20b": Model(
        *("gpt-oss 20B", "openai/gpt-oss-20b", "gpt_oss", "20B"),
        _cards("8 h100", "1 h100", _4090),
        lrs=_LARGE,
        reasoning=_EFFORT,
    ),
    "llama-3.1-8b": Model("Llama 3.1 8B", "meta-llama/Llama-3.1-8B-Instruct", "llama3", "8B", _8B),
    "llama-3.2-1b": Model(
        *("Llama 3.2 1B", "meta-llama/Llama-3.2-1B-Instruct", "llama3", "1B"),
        _cards(_L40S, _4090, _4090),
    ),
    "llama-3.2-3b": Model("Llama 3.2 3B", "meta-llama/Llama-3.2-3B-Instruct", "llama3", "3B", _3B),
    "ministral-8b": Model(
        "Ministral 8B", "mistralai/Ministral-8B-Instruct-2410", "mistral", "Ministral-8B", _8B
    ),
    "olmo-3-7b": Model(
        *("OLMo 3 7B", "allenai/Olmo-3-7B-Instruct", "olmo", "3-7B"),
        _cards("4 h100", _L40S, _4090, grpo="1 h100"),  # keys and values of 32 heads
    ),
    "phi-4": Model(
        *("Phi-4", "microsoft/phi-4", "phi3", "4"),
        _cards("8 h100", "1 h100", _4090),
        lrs=_LARGE,
    ),
    "qwen3-0.6b": Model(
        *("Qwen3 0.6B", "Qwen/Qwen3-0.6B", "qwen3", "0.6B"),
        _cards(_4090, _4090, _4090),
        reasoning=_THINKING,
    ),
    "qwen3-4b": Model(
        *("Qwen3 4B", "Qwen/Qwen3-4B", "qwen3", "4B"),
        _cards("2 h100", _4090, _4090, grpo=_L40S),
        reasoning=_THINKING,
    ),
    "qwen3-8b": Model("Qwen3 8B", "Qwen/Qwen3-8B", "qwen3", "8B", _8B, reasoning=_THINKING),
    "qwen3-32b": Model(
        *("Qwen3 32B", "Qwen/Qwen3-32B", "qwen3", "32B"),
        _cards("8 h200", "1 h200", _L40S),
        lrs=_LARGE,
        reasoning=_THINKING,
    ),
    "qwen3-30b-a3b": Model(
        *("Qwen3 30B-A3B", "Qwen/Qwen3-30B-A3B", "qwen3_moe", "30B-A3B"),
        _cards("8 h200", "1 h200"),
        lrs=_LARGE,
        reasoning=_THINKING,
    ),
    "qwen3.5-4b": Model(
        *("Qwen3.5 4B", "Qwen/Qwen3.5-4B", "qwen3_5", "4B"),
        _cards("2 h100", _L40S, _4090),
        reasoning=_THINKING,
    ),
    "smollm3-3b": Model(
        *("SmolLM3 3B", "HuggingFaceTB/SmolLM3-3B", "smollm3", "3B", _3B), reasoning=_THINKING
    ),
}

RECIPES = [f"{name}/{method}" for name, model in MODELS.items() for method in model.cards]


def cards_of(recipe: str) -> tuple[int, str]:
    """Return how many cards a recipe is for, and of which kind."""
    name, method = recipe.split("/")
    number, kind = MODELS[name].cards[method].split()
    return int(number), kind


def recipe_text(recipe: str, path: str) -> str:
    """Return the file of a recipe, such as `qwen3-8b/lora`, whose comments call it `path`. Raise
    `UserError` for an unknown one, and for a path of several lines."""
    recipe = recipe.lower()
    if not path.isprintable():
        raise UserError(f"{path!r} has characters that cannot be printed; use another path")
    if recipe in MODELS:
        methods = ", ".join(MODELS[recipe].cards)
        raise UserError(f"recipe '{recipe}' needs a method: {recipe}/METHOD, one of {methods}")
    if recipe not in RECIPES:
        raise UserError(
            f"unknown recipe '{recipe}'{suggest(recipe, RECIPES)}; torchtitan new --recipes "
            "lists them"
        )
    (name, key), (number, kind) = recipe.split("/"), cards_of(recipe)
    model, method = MODELS[name], METHODS[key]
    several = f"NGPU={number} " if number > 1 else ""
    answer = _REASONED.format(reasoning=model.reasoning) if model.reasoning else _ANSWER
    token = "  # needs HF_TOKEN" if model.repository.partition("/")[0] in _GATED else ""
    return f"""\
# {model.title}, {method.title}, on {number} {kind}.
#
#   torchtitan download {model.repository}{token}
#   {several}torchtitan train --config_file {shlex.quote(path)}
#
# Add any option of `torchtitan train` here or on the command line.
module: {method.module}
config: {method.config}
hf_assets_path: {model.folder}
dump_folder: outputs/{name}-{key}  # checkpoints, metrics, report

dataloader:
  dataset: [{method.data}]  # {method.rows}

training:
  steps: 300  # or epochs: 3
  seq_len: {_SEQ_LEN}  # tokens of a window; more needs more memory
  local_batch_size: 1  # windows that a card computes at once; more needs more memory
  global_batch_size: {method.global_batch_size}  # {method.of_batch}

optimizer:
  lr: {model.lrs.get(key, method.lr)}  # after a warm-up of 10 steps; then it falls to a tenth

activation_checkpoint:
  mode: {_GRPO_MODE if key == "grpo" else _MODE}
{method.more.replace("{answer}", answer)}"""


_MODE = "auto  # the fastest of none, selective and full that fits"
_GRPO_MODE = "full  # selective and none are faster, and need more memory"
_GATED = ("meta-llama", "google", "mistralai")
"""Owners whose license must be accepted on the hub."""
