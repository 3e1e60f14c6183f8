"""Selection of a configuration, and options of GRPO, which several libraries share."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from torchtitan.config.migration.outcome import Migration, Row, as_list
from torchtitan.tools.errors import UserError


class _Selection(NamedTuple):
    module: str
    config: str
    adapted: str
    """Configuration with low-rank adapters."""
    in_4_bits: str
    """Configuration with low-rank adapters on weights in 4 bits."""


_SELECTIONS = {
    "sft": _Selection("auto", "sft", "lora", "qlora"),
    "dpo": _Selection("preference", "dpo", "dpo_lora", "dpo_qlora"),
    "kto": _Selection("preference", "kto", "kto_lora", "kto_qlora"),
    "grpo": _Selection("rl", "grpo", "grpo_lora", "grpo_qlora"),
    "reward": _Selection("reward", "bradley_terry", "reward_lora", "reward_qlora"),
}
_ADAPTER_KEYS = (
    *("lora_", "loraplus_", "peft_", "use_dora", "use_rslora"),
    "adapter_name_or_path",
)


_SMOOTHED = {"dpo": "cdpo", "robust": "robust", "exo": "exo"}
"""Loss of pairs → the same with labels that may be wrong."""


def smoothing(migration: Migration, key: str) -> None:
    """Read the probability that a label of a pair is wrong, after the loss."""
    value = migration.get(key)
    if value is None:
        return
    kind = _SMOOTHED.get(str(migration.options.get("loss.kind", "dpo")))
    if not float(value):
        migration.drop(key, "labels are certain")
    elif kind is None:
        migration.miss(key, f"--loss.kind {migration.options['loss.kind']} has certain labels")
    else:
        named = {"loss__kind": kind, "loss__label_smoothing": float(value)}
        migration.change(key, "", **named)


def select(
    migration: Migration,
    method: str,
    *,
    adapters: bool,
    in_4_bits: bool = False,
    images: bool = False,
) -> None:
    """Choose the configuration of a method. Batches of pairs count pairs there, and so are not
    packed here, except KTO's, which need several answers."""
    chosen = _SELECTIONS[method]
    migration.module, migration.config = chosen.module, chosen.config
    migration.reads_images = images
    if adapters:
        # Of the methods on images, only fine-tuning has weights in 4 bits.
        in_4_bits = in_4_bits and (method == "sft" or not images)
        migration.config = chosen.in_4_bits if in_4_bits else chosen.adapted
    if method == "kto":
        why = (
            "KTO packs answers, so that a batch counts windows: lower --training.global_batch_size"
        )
        migration.rows.append(Row("answers of a batch", "", "without a counterpart", why))
    elif chosen.module in ("preference", "reward"):
        migration.set(dataloader__packing="none")
    if not migration.has_adapters:
        for key in migration.keys():
            if key.startswith(_ADAPTER_KEYS):
                migration.drop(key, "whole models are trained")


def note_adapters(migration: Migration, key: str, *, wanted: bool) -> None:
    """Note a key that asks for adapters, after the selection."""
    if not wanted:
        migration.drop(key, "it is off")
    else:
        migration.change(key, f"--module {migration.module} --config {migration.config_name}")


def note_bits(migration: Migration, key: str, *, bits: int) -> None:
    """Note a key that asks for frozen weights in 4 or 8 bits (0: it is off)."""
    if not bits:
        migration.drop(key, "it is off")
    elif bits == 4 and "qlora" in migration.config:
        migration.change(key, f"--config {migration.config_name}")
    elif bits == 4 or not migration.has_adapters:
        migration.miss(key, f"weights of {migration.config_name} are not kept in {bits} bits")
    else:
        migration.miss(key, "frozen weights are kept in 16 bits, or in 4 with QLoRA")


def orpo_weight(migration: Migration, key: str) -> None:
    """Set the weight of ORPO's odds ratio, called beta elsewhere."""
    migration.take(key, "loss.weight", float(migration.get(key)))


_METHODS = ("grpo", "dr_grpo", "dapo")
_ADVANTAGES = {
    **dict.fromkeys((True, "true", "group"), "normalized"),
    **dict.fromkeys((False, "false", "none"), "centered"),
    "batch": "batch_scaled",
}
_OFF_AT = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
_ROOM_OF_PROMPTS = 1024

GRPO_DEFAULTS: Mapping[str, object] = {
    "num_generations": 8,
    "max_completion_length": 512,
    "beta": 0.0,
    "loss_type": "dapo",
    "scale_rewards": "group",
    "epsilon": 0.2,
}
"""Values of TRL that ours differ from, or that decide others."""


def grpo(migration: Migration, prefix: str = "") -> int:
    """Read the options of TRL's GRPO, whose names begin with `prefix`. Return the answers to each
    prompt: TRL's batches are larger than ours by this factor."""
    size = int(migration.get(f"{prefix}num_generations"))
    if size < 1:
        raise UserError(f"num_generations is {size}, but must be at least 1")
    migration.take(f"{prefix}num_generations", "rollout.group_size", size)
    migration.take(f"{prefix}beta", "policy.beta", float(migration.get(f"{prefix}beta")))
    _policy_loss(migration, prefix)
    _scaling(migration, f"{prefix}scale_rewards")
    _clipping(migration, prefix)
    _length(migration, prefix)
    _sampling(migration, prefix)
    _updates(migration, prefix)
    _rewards(migration, prefix)
    return size


def group_batch(migration: Migration, micro: str, accumulation: str, group_size: int) -> None:
    """Set batches of prompts. TRL counts their answers, `group_size` each."""
    size, passes = int(migration.get(micro)), int(migration.get(accumulation))
    answers = size * passes * migration.devices
    if answers % group_size:
        raise UserError(
            f"{size} x {passes} x {migration.devices} devices are {answers} answers, which groups "
            f"of {group_size} (num_generations) do not divide; --devices gives the devices"
        )
    prompts = answers // group_size
    local = math.gcd(prompts, max(1, size // group_size))
    why = f"prompts, with {group_size} answers each"
    migration.take(micro, "training.local_batch_size", local, why)
    counted = f"{answers} answers ({size} x {passes} x {migration.devices} devices) by {group_size}"
    migration.change(accumulation, counted, training__global_batch_size=prompts)


def _policy_loss(migration: Migration, prefix: str) -> None:
    key = f"{prefix}loss_type"
    name = str(migration.get(key))
    if name not in _METHODS:
        migration.set(policy__method="grpo")
        migration.miss(key, "the file has grpo instead; see --policy.method")
    elif name == "dapo":
        why = "groups with equal rewards are sampled again, which TRL does not"
        migration.take(key, "policy.method", "dapo", why)
    else:
        migration.take(key, "policy.method", name)
    key = f"{prefix}importance_sampling_level"
    if (level := migration.get(key)) == "token":
        migration.drop(key, "the default")
    elif level is not None:
        migration.miss(key, "ratios are of tokens; see --policy.method gspo")


def _scaling(migration: Migration, key: str) -> None:
    value = migration.get(key)
    if value in _ADVANTAGES:
        migration.take(key, "policy.advantage", _ADVANTAGES[value])
    else:
        migration.miss(key, "see --policy.advantage")


def _clipping(migration: Migration, prefix: str) -> None:
    low = float(migration.get(f"{prefix}epsilon"))
    high = migration.get(f"{prefix}epsilon_high")
    migration.set(policy__clip_high=low if high is None else float(high))
    migration.take(f"{prefix}epsilon", "policy.clip_low", low)
    if high is not None:
        migration.take(f"{prefix}epsilon_high", "policy.clip_high", float(high))


def _length(migration: Migration, prefix: str) -> None:
    key, prompts = f"{prefix}max_completion_length", f"{prefix}max_prompt_length"
    n_tokens, room = int(migration.get(key)), migration.get(prompts)
    seq_len = n_tokens + int(_ROOM_OF_PROMPTS if room is None else room)
    migration.set(training__seq_len=seq_len)
    migration.take(key, "rollout.max_new_tokens", n_tokens)
    if room is not None:
        migration.change(prompts, "prompt and answer together", training__seq_len=seq_len)
    migration.set(rollout__overlong="keep")
    key = f"{prefix}mask_truncated_completions"
    if migration.get(key):
        migration.miss(key, "answers that reach --rollout.max_new_tokens are trained")
    elif migration.get(key) is not None:
        migration.take(key, "rollout.overlong", "keep")


def _sampling(migration: Migration, prefix: str) -> None:
    if (value := migration.get(key := f"{prefix}temperature")) is not None:
        migration.take(key, "rollout.temperature", float(value))
    for name, off in _OFF_AT.items():
        if (value := migration.get(key := f"{prefix}{name}")) is None:
            continue
        if float(value) == off:
            migration.drop(key, "all tokens, the default")
        else:
            migration.take(key, f"rollout.{name}")


def _updates(migration: Migration, prefix: str) -> None:
    if (number := migration.get(key := f"{prefix}num_iterations")) == 1:
        migration.drop(key, "the default")
    elif number is not None:
        migration.miss(key, "see --policy.updates; a step here has all updates of its samples")
    for name in ("steps_per_generation", "generation_batch_size"):
        if migration.get(key := f"{prefix}{name}") is not None:
            migration.miss(key, "answers are sampled for each step")
    if migration.get(key := f"{prefix}use_vllm"):
        migration.miss(key, "start a server, and set --rollout.engine vllm")
    elif migration.get(key) is not None:
        migration.drop(key, "the embedded engine is the default")
    for name in ("vllm_server_host", "vllm_server_port", "vllm_server_base_url"):
        if migration.get(key := f"{prefix}{name}") is not None:
            migration.miss(key, "the address of the server: --rollout.url http://HOST:PORT")


_REWARDS = {
    "accuracy_reward": "math",
    "think_format_reward": r"pattern=\A<think>(?!.*<think>).*?</think>",
}
"""Reward of TRL → ours."""


def _rewards(migration: Migration, prefix: str) -> None:
    """Set TRL's own rewards by our names. Functions of the user have other parameters here."""
    key, key_of_weights = f"{prefix}reward_funcs", f"{prefix}reward_weights"
    names = [str(name) for name in as_list(migration.get(key) or [])]
    plain = [name.removeprefix("trl.rewards.") for name in names]
    weights = migration.get(key_of_weights)
    if names and {*plain} <= _REWARDS.keys():
        why = "math reads the column answer or solution, and needs the extra math"
        ours = [_REWARDS[name] for name in plain]
        migration.take(key, "rewards", ours, why if "math" in ours else "")
        if weights is not None:
            numbers = [float(weight) for weight in as_list(weights)]
            migration.take(key_of_weights, "reward_weights", numbers)
        return
    if names:
        known = [f"{name} is {_REWARDS[name]} here" for name in plain if name in _REWARDS]
        why = "a function of prompt, completion and row: --rewards my_rewards.py:score"
        migration.miss(key, "; ".join([*known, why]))
    if weights is not None:
        migration.miss(key_of_weights, "one for each of --rewards: --reward_weights")
