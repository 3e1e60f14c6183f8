"""Reinforcement learning from prompts with images, against the classes called directly."""

import json
import re
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.models.test_images import ABSENT_PACKAGES
from tests.processes import run_processes
from tests.tiny_vision import (
    VISION_TYPES,
    parts_in,
    reference_inputs,
    text_of,
    vision_folder,
    write_scores,
)
from tests.training import ABSENT, flags, killed_in, read_metrics, run
from tests.vision_types_leading import LEADING_TYPES, PLACING_TYPES
from torchtitan.components.generation import next_tokens
from torchtitan.components.images.files import ImageOpener
from torchtitan.components.images.reader import ImageReader
from torchtitan.components.losses.policy_loss import group_advantages
from torchtitan.components.rollout.rollout import Trajectory
from torchtitan.config.manager import ConfigManager
from torchtitan.experiments.ppo.trainer import PPOTrainer
from torchtitan.experiments.reward.rating import RewardModel
from torchtitan.experiments.rl.trainer import RLTrainer
from torchtitan.models.transformers.model import TransformersModel
from torchtitan.tools.errors import UserError

FAST, SLOW = "qwen3_vl", ("gemma3", "smolvlm", "internvl", "emu3")
NOT_EQUAL = pytest.mark.xfail(
    raises=AssertionError,
    reason="what the class computes depends on the padding, by 5e-3",
    strict=True,
)
MORE = (
    *("aria", "chameleon", "cohere_compass", "cosmos3_edge", "cosmos3_omni", "deepseek_ocr2"),
    *(
        "deepseek_vl_hybrid",
        "dots3_note",
        "ernie4_5_vl_moe",
        "exaone4_5",
        "gemma3n",
        "glm4v_moe",
        "glm5_next",
        "glm_ocr",
    ),
    *("glmga", "granite4_vision", "granite_docling", "hyperclovax_vision_v2", "idefics2", "janus"),
    *("lfm3_vl", "llava_next_video", "minicpmv4_6", "mistral_large4", "molmo2", "pp_chart2table"),
    *("qianfan_ocr", "qwen3_5_moe", "video_llava", *LEADING_TYPES, *PLACING_TYPES),
)
"""Further types, with other mechanisms."""
MARKS = ({"hunyuan_vl": NOT_EQUAL}, ABSENT_PACKAGES)
TYPES = [
    FAST,
    *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
    *(
        pytest.param(name, marks=[pytest.mark.long, *(m[name] for m in MARKS if name in m)])
        for name in (*VISION_TYPES, *MORE)
        if name not in (FAST, *SLOW)
    ),
]

SIZES = [[(40, 56)], [(64, 48), (30, 70)], [], [(20, 90), (90, 20)]]
"""Sizes of the images of each prompt."""
BETA = 0.3
OPTIONS = {
    "training.steps": 1,
    "training.seq_len": 1024,
    "training.local_batch_size": 4,
    "training.mixed_precision_param": "float32",
    "model.train": ["language", "projector", "vision"],
    "optimizer.lr": 1e-3,
    "lr_scheduler.warmup_steps": 0,
    "metrics.log_freq": 1,
    "metrics.enable_tensorboard": False,
    "activation_checkpoint.mode": "none",
    "rollout.group_size": 3,
    "rollout.max_new_tokens": 6,
    "rollout.max_rows": 5,
    "rewards": ["length=4"],
    "checkpoint.enable": False,
    "checkpoint.last_save_in_hf": False,
    "checkpoint.export_dtype": None,
}
ROLLOUTS = """
from torchtitan.components.rollout.rollout import Trajectory

async def two_turns(row, engine):
    assert [image.decode().size for image in engine.images] == [tuple(s) for s in row["sizes"]]
    trajectory = Trajectory()
    trajectory.append(engine.prompt)
    for tool in ([5, 6, 7], []):
        answer = await engine.generate(trajectory.tokens, 3)
        trajectory.append(answer.ids, answer.logprobs)
        trajectory.append(tool)
    trajectory.reward = float(len(trajectory.tokens))
    return trajectory

async def writes_an_image(row, engine):
    trajectory = Trajectory()
    trajectory.append(engine.prompt)
    answer = await engine.generate(trajectory.tokens, 3)
    trajectory.append(answer.ids, answer.logprobs)
    trajectory.append(engine.prompt)
    return trajectory
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that writes the folder of a type once."""
    root = tmp_path_factory.mktemp("vision")
    return lru_cache(lambda model_type: vision_folder(model_type, root / model_type))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder with prompts and their images; the conversations as transformers wants them, and the
    opened images."""
    folder = tmp_path_factory.mktemp("prompts")
    generator = np.random.default_rng(0)
    rows, conversations, images = [], [], []
    for number, sizes in enumerate(SIZES):
        names, opened = [], []
        for index, (width, height) in enumerate(sizes):
            values = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
            names.append(f"{number}-{index}.png")
            opened.append(Image.fromarray(values))
            opened[-1].save(folder / names[-1])
        question = {"type": "text", "text": f"What is number {number}?"}
        paths = [{"type": "image", "image": name} for name in names]
        messages = [{"role": "user", "content": [*paths, question]}]
        rows.append({"messages": messages, "answer": str(number), "sizes": sizes})
        places = [{"type": "image"} for _ in names]
        conversations.append([{"role": "user", "content": [*places, question]}])
        images.append(opened)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rollouts.py").write_text(ROLLOUTS)
    return folder, conversations, images


def config_of(model: Path, data: Path, dump: Path, **options: Any) -> Any:
    changed = {name.replace("__", "."): value for name, value in options.items()}
    method = changed.get("policy.method", "grpo")
    module, config = ("ppo", "ppo_images") if method == "ppo" else ("rl", "grpo_images")
    config = changed.pop("config", config)
    words = {
        "hf_assets_path": model,
        "dataloader.dataset": [data / "prompts.jsonl"],
        "dataloader.cache_dir": data / "cache",
        "dump_folder": dump,
        **OPTIONS,
        **changed,
    }
    words = {name: value for name, value in words.items() if value != ABSENT}
    parsed = ConfigManager().parse_args(["--module", module, "--config", config, *flags(words)])
    n_processes = 1
    if torch.distributed.is_initialized():
        n_processes = torch.distributed.get_world_size()
    parsed.config.check(world_size=n_processes)
    return parsed.config


def train(model: Path, data: Path, dump: Path, **options: Any) -> Any:
    return run(config_of(model, data, dump, **options))


class Capturing:
    """Keeps the trajectories of a step, and the trainer's log-probabilities of them."""

    def sample_groups(self, batches: Any) -> Any:
        groups = super().sample_groups(batches)  # type: ignore[misc]
        self.groups = groups
        return groups

    def update(self, micro_batches: Any) -> Any:
        self.result = super().update(micro_batches)  # type: ignore[misc]
        self.old: dict[int, list[float]] = {}
        for batch in micro_batches:
            is_trained = batch["labels"] != -100
            for number in batch["samples"][is_trained].unique().tolist():
                chosen = is_trained & (batch["samples"] == number)
                self.old[number] = batch["old_logprobs"][chosen].tolist()
        return self.result


class CapturingGRPO(Capturing, RLTrainer):
    pass


class CapturingPPO(Capturing, PPOTrainer):
    pass


def changed_model(folder: Path, to: Path) -> Path:
    """Write a model like that of `folder` with other weights."""
    from transformers import AutoModelForImageTextToText

    shutil.copytree(folder, to)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(to)
    return to


def log_probs_of(model: Any, trajectory: Trajectory, inputs: dict[str, Any]) -> torch.Tensor:
    """Return the log-probabilities of the sampled tokens, by the class alone. `inputs` are those of
    the prompt, by its own processor."""
    n_prompt = trajectory.loss_mask.index(True)
    prompt = inputs["input_ids"][0].tolist()
    assert len(prompt) == n_prompt
    n_new = len(trajectory.tokens) - n_prompt - 1  # the last one may be of an image
    whole = {**inputs, "input_ids": torch.tensor([[*prompt, *trajectory.tokens[n_prompt:-1]]])}
    for name, values in inputs.items():
        if name == "attention_mask" or name.endswith(("token_type_ids", "position_mask")):
            end = torch.full((1, n_new), int(name == "attention_mask"))
            whole[name] = torch.cat((values, end), dim=1)
        if name == "image_attention_mask":
            whole[name] = torch.cat((values, values[:, -1:].expand(-1, n_new, -1)), dim=1)
    logits = model(**whole).logits[0, n_prompt - 1 :]
    new = torch.tensor(trajectory.tokens[n_prompt:])
    return logits.log_softmax(-1).gather(1, new[:, None])[:, 0]


def prompt_inputs(model_type: str, folder: Path, conversations: Any, images: Any) -> list[Any]:
    """Return what the processor of transformers makes of each prompt."""
    from transformers import AutoTokenizer

    inputs: list[Any] = []
    for conversation, opened in zip(conversations, images, strict=True):
        options = {"add_generation_prompt": True}
        if opened or model_type in {**LEADING_TYPES, **PLACING_TYPES}:
            inputs.append(reference_inputs(model_type, folder, [conversation], [opened], **options))
        else:
            tokenizer = AutoTokenizer.from_pretrained(folder)
            text = text_of(folder, conversation, **options)
            inputs.append(dict(tokenizer(text, return_tensors="pt")))
    return inputs


def row_of(tokens: list[int], prompts: list[list[int]], image_id: int | None) -> int:
    """Return the row with a prompt. Prompts of Emu3 have the codes of images in their places."""

    def fits(prompt: list[int]) -> bool:
        pairs = zip(tokens, prompt, strict=True)
        return all(own in (image_id, token) for own, token in pairs)

    [row] = [row for row, one in enumerate(prompts) if len(one) == len(tokens) and fits(one)]
    return row


@pytest.mark.parametrize("model_type", TYPES)
def test_a_step_equals_the_class(model_type: str, folders: Any, data: Any, tmp_path: Path) -> None:
    """Log-probabilities when sampled and when trained, loss and gradients, with a reference. The
    tolerances are those of float32 with sums in another order."""
    from transformers import AutoModelForImageTextToText

    folder = folders(model_type)
    source, conversations, images = data
    other = changed_model(folder, tmp_path / "reference")
    options = {"policy__beta": BETA, "reference__path": other, "model__train": parts_in(folder)}
    trainer = run(config_of(folder, source, tmp_path / "run", **options), CapturingGRPO)
    assert isinstance(trainer, CapturingGRPO)
    model, reference = (
        AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
        for path in (folder, other)
    )
    inputs = prompt_inputs(model_type, folder, conversations, images)
    of_reference = prompt_inputs(model_type, other, conversations, images)
    prompts = [each["input_ids"][0].tolist() for each in inputs]
    trajectories = [trajectory for group in trainer.groups for trajectory in group]
    rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
    advantages = group_advantages(rewards.view(-1, 3)).flatten()
    total = torch.zeros(())
    seen = set()
    for number, trajectory in enumerate(trajectories):
        start = trajectory.loss_mask.index(True)
        image_id = model.config.image_token_id if model_type == "emu3" else None
        row = row_of(trajectory.tokens[:start], prompts, image_id)
        seen.add(row)
        expected = log_probs_of(model, trajectory, inputs[row])
        assert trajectory.logprobs[start:] == pytest.approx(expected.tolist(), abs=2e-5)
        assert trainer.old[number] == pytest.approx(expected.tolist(), abs=2e-5)
        with torch.no_grad():
            away = log_probs_of(reference, trajectory, of_reference[row]) - expected
        kl = (away + expected.detach() - expected).expm1() - (away + expected.detach() - expected)
        ratio = (expected - expected.detach()).exp()
        total = total + (BETA * kl - advantages[number].float() * ratio).mean()
    assert seen == set(range(len(SIZES)))
    loss = total / len(trajectories)
    loss.backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    assert trainer.result.loss == pytest.approx(loss.item(), abs=2e-5)
    assert trainer.result.grad_norm == pytest.approx(torch.cat(gradients).norm().item(), rel=2e-5)
    assert advantages.abs().max() > 0.5


def two_rows(data: Path, folder: Path) -> Path:
    """Return a folder with the prompts that have an image, and without their order."""
    folder.mkdir()
    for path in data.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    rows = (data / "prompts.jsonl").read_text().splitlines()
    (folder / "prompts.jsonl").write_text("".join(f"{row}\n" for row in rows[:2]))
    return folder


def test_several_turns_keep_the_images(folders: Any, data: Any, tmp_path: Path) -> None:
    """Probabilities when sampled and when trained are equal after a tool's output too."""
    source, *_ = data
    options = {"rollout__function": f"{source / 'rollouts.py'}:two_turns", "rewards": []}
    train(folders("smolvlm"), source, tmp_path, **options)
    [(_, weight, length)] = read_metrics(tmp_path, "importance_weight", "length")
    assert weight == pytest.approx(1, abs=1e-5)
    assert 2 <= length <= 6


def test_images_after_the_prompt_are_refused(folders: Any, data: Any, tmp_path: Path) -> None:
    source, *_ = data
    options = {"rollout__function": f"{source / 'rollouts.py'}:writes_an_image", "rewards": []}
    folder = two_rows(source, tmp_path / "data")
    with pytest.raises(UserError, match=r"prompts.jsonl:\d: it has \d+ tokens of images, and its"):
        train(folders("smolvlm"), folder, tmp_path / "run", training__local_batch_size=2, **options)


def test_a_sampled_image_token_ends_the_answer(
    folders: Any, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class could not compute what follows it."""
    source, *_ = data
    folder = folders("smolvlm")
    document = json.loads((folder / "config.json").read_text())
    monkeypatch.setattr(
        next_tokens,
        "draw",
        lambda logits_BV, *_: torch.full(logits_BV.shape[:1], document["image_token_id"]),
    )
    train(folder, source, tmp_path)
    [row] = read_metrics(tmp_path, "length", "truncated", "loss", "grad_norm")
    assert row[1:] == (1, 1, 0, 0)


def test_a_refusal_of_the_processor_ends_the_run_before_a_forward_pass(
    folders: Any, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks would wait in the pass for the weights of the vision tower."""

    def refusing(self: Any, images: Any, tokens_BL: Any) -> Any:
        raise ValueError("images of different shapes")

    def forward(*_: Any, **__: Any) -> Any:
        raise AssertionError("a forward pass has begun")

    monkeypatch.setattr(ImageReader, "inputs", refusing)
    monkeypatch.setattr(TransformersModel, "forward", forward)
    source, *_ = data
    with pytest.raises(ValueError, match="images of different shapes"):
        train(folders("smolvlm"), source, tmp_path / "run")


def test_a_changed_image_ends_the_run(folders: Any, data: Any, tmp_path: Path) -> None:
    source, _, images = data
    folder = two_rows(source, tmp_path / "data")
    config = config_of(folders("smolvlm"), folder, tmp_path / "run", training__local_batch_size=2)
    trainer = config.build()
    images[3][0].save(folder / "0-0.png")
    with pytest.raises(UserError, match="0-0.png has changed since its row was tokenized"):
        try:
            trainer.train()
        finally:
            trainer.close()


def test_vllm_is_refused(folders: Any, data: Any, tmp_path: Path) -> None:
    source, *_ = data
    with pytest.raises(UserError, match="--rollout.engine vllm sends token ids only"):
        config_of(folders("smolvlm"), source, tmp_path, rollout__engine="vllm")


REWARDS = """
def n_images(prompt, completion, row, images):
    assert [image.decode().size for image in images] == [tuple(size) for size in row["sizes"]]
    return len(images)

def widths(prompts, completions, rows, images):
    return [sum(image.width for image in of_row) for of_row in images]
"""


def test_rewards_see_the_images(folders: Any, data: Any, tmp_path: Path) -> None:
    """A function of one answer, a function of a batch, and a reward model, which rates the logged
    answers when called alone."""
    source, *_ = data
    (tmp_path / "seeing.py").write_text(REWARDS)
    scores = write_scores(vision_folder("qwen3_vl", tmp_path / "scores"))
    functions = [f"{tmp_path}/seeing.py:n_images", f"{tmp_path}/seeing.py:widths"]
    options = {"rewards": [*functions, f"reward_model={scores}"], "reward_weights": [1e3, 1, 1e-3]}
    train(folders("qwen3_vl"), source, tmp_path / "run", **options)
    rows = [json.loads(line) for line in (source / "prompts.jsonl").read_text().splitlines()]
    opener = ImageOpener(source)
    rate = RewardModel(str(scores), with_images=True)
    logged = (tmp_path / "run/completions.jsonl").read_text().splitlines()
    assert len(logged) > 1
    for line in map(json.loads, logged):
        [row] = [row for row in rows if row["messages"][0]["content"][-1]["text"] in line["prompt"]]
        parts = row["messages"][0]["content"][:-1]
        images = [opener.open(part["image"]) for part in parts]
        completion = re.sub(r"<\|\w+\|>", "", line["completion"])  # special tokens
        [reward] = rate([""], [completion], [row], [images])
        seen = 1e3 * len(images) + sum(image.width for image in images)
        assert line["reward"] == pytest.approx(seen + 1e-3 * reward, abs=1e-6)


def test_a_reward_model_that_reads_text_only_is_refused(
    folders: Any, data: Any, tmp_path: Path
) -> None:
    source, *_ = data
    from transformers import LlamaConfig, LlamaForSequenceClassification

    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 8)
    heads = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_labels": 1}
    folder = tmp_path / "text"
    LlamaForSequenceClassification(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    with pytest.raises(UserError, match="reads no images"):
        config_of(folders("smolvlm"), source, tmp_path, rewards=[f"reward_model={folder}"])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ppo", "dapo", "gspo"])
def test_other_methods(method: str, folders: Any, data: Any, tmp_path: Path) -> None:
    source, *_ = data
    options = {"policy__method": method, "training__steps": 2, "training__epochs": None}
    train(folders("qwen3_vl"), source, tmp_path, **options)
    rows = read_metrics(tmp_path, "importance_weight", "grad_norm")
    assert len(rows) == 2
    for _, weight, grad_norm in rows:
        assert weight == pytest.approx(1, abs=1e-5)
        assert grad_norm > 0


def test_adapters_learn_from_rewards(folders: Any, data: Any, tmp_path: Path) -> None:
    """Sampled by the engine as the trainer computes them, before and after an update; the model
    without adapters is the reference, from which the second step's model differs."""
    source, *_ = data
    options = {
        "config": "grpo_lora_images",
        "model__train": ABSENT,
        "policy__beta": 0.1,
        "optimizer__lr": 1e-2,
        "training__steps": 2,
        "training__epochs": None,
    }
    trainer = train(folders("smolvlm"), source, tmp_path, **options)
    trained = [n for n, p in trainer.model_parts[0].named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    assert "reference" not in trainer.models
    first, second = read_metrics(tmp_path, "importance_weight", "grad_norm", "kl")
    assert first[1] == second[1] == pytest.approx(1, abs=1e-5)
    assert first[2] > 0
    assert first[3] == pytest.approx(0, abs=1e-6) and second[3] > 1e-5


@pytest.mark.slow
def test_a_killed_run_continues_exactly(folders: Any, data: Any, tmp_path: Path) -> None:
    source, *_ = data
    options = {
        "training__steps": 4,
        "training__local_batch_size": 2,
        "checkpoint__enable": True,
        "checkpoint__interval": 1,
    }
    chosen = (folders("smolvlm"), source)
    train(*chosen, tmp_path / "straight", **options)
    with killed_in(RLTrainer, "train_step", 3):
        train(*chosen, tmp_path / "killed", **options)
    train(*chosen, tmp_path / "killed", **options)
    names = ("loss", "grad_norm", "reward", "length")
    expected = read_metrics(tmp_path / "straight", *names)
    assert len(expected) == 4
    assert read_metrics(tmp_path / "killed", *names) == expected


def train_rank(folder: Path, model: Path, data: Path, options: dict[str, Any]) -> None:
    train(model, data, folder, **options)


ON_TWO_RANKS = {
    "sharded": {"data_parallel_shard_degree": 2},
    "replicated": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1},
    "tensor parallel": {"tensor_parallel_degree": 2},
}


@pytest.fixture(scope="module")
def on_one_rank(folders: Any, data: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of two steps in this process."""
    dump = tmp_path_factory.mktemp("one")
    train(folders("smolvlm"), data[0], dump, training__steps=2)
    return dump


@pytest.mark.slow
@pytest.mark.parametrize("layout", ON_TWO_RANKS)
def test_two_ranks_equal_one(
    layout: str, on_one_rank: Path, folders: Any, data: Any, tmp_path: Path
) -> None:
    """One rank has fewer images in some passes, or none."""
    source, *_ = data
    options = {
        "training__steps": 2,
        "training__local_batch_size": 1,
        "training__global_batch_size": 4,
        **{f"parallelism__{name}": degree for name, degree in ON_TWO_RANKS[layout].items()},
    }
    run_processes(train_rank, 2, tmp_path / "two", folders("smolvlm"), source, options)
    names = ("loss", "grad_norm", "reward", "length", "importance_weight")
    expected = read_metrics(on_one_rank, *names)
    found = read_metrics(tmp_path / "two", *names)
    assert np.array(found) == pytest.approx(np.array(expected), rel=1e-4, abs=1e-5)
