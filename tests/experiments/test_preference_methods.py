"""One packed batch of each method against TRL, kinds of reference, and sharded and resumed KTO."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

from tests.experiments.test_preference import OPTIONS, folder  # noqa: F401
from tests.processes import run_processes
from tests.training import flags, killed_in, read_metrics, run
from torchtitan.components.losses import preference_losses
from torchtitan.config.manager import ConfigManager
from torchtitan.experiments.preference.online import OnlinePreferenceTrainer
from torchtitan.experiments.preference.trainer import KTOTrainer, PreferenceTrainer
from torchtitan.tools.errors import UserError

PACKED = {"dataloader.packing": "ffd", "training.seq_len": 256, "training.local_batch_size": 1}
PACKED |= {"training.global_batch_size": 1}
PAIR_NUMBERS = [
    "loss",
    "grad_norm",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
]
SMOOTHING = {"label_smoothing": 0.1}
KTO_NUMBERS = ["loss", "grad_norm", "rewards/chosen", "rewards/rejected", "rewards/margins", "kl"]
STEP = {"training__steps": 1}


def train(folder: Path, dump: Path, config: str, **options: object) -> PreferenceTrainer:  # noqa: F811
    changed = {key.replace("__", "."): value for key, value in options.items()}
    common = {
        "hf_assets_path": folder / "model",
        "dataloader.dataset": [folder / "odd.jsonl"],
        "dump_folder": dump,
    }
    common["dataloader.cache_dir"] = folder / "cache"
    merged = {**common, **OPTIONS, **PACKED, **changed}
    if config == "online_dpo":
        del merged["dataloader.packing"]  # prompts are packed later, with their answers
    words = flags(merged)
    parsed = (
        ConfigManager().parse_args(["--module", "preference", "--config", config, *words]).config
    )
    parsed.check(
        world_size=1
        if not torch.distributed.is_initialized()
        else torch.distributed.get_world_size()
    )
    trainer = run(parsed)
    assert isinstance(trainer, PreferenceTrainer)
    return trainer


def write_answers(folder: Path) -> Path:  # noqa: F811
    """Write single answers, desirable ones first and each part by falling length: the order within
    a window. No prompt repeats, since TRL would compare answers to the same prompt."""
    rows = [
        {
            "prompt": f"Is {i + 3 * (not label)} a big number?",
            "completion": "No, it is " + "quite " * n + "small.",
            "label": label,
        }
        for label in (True, False)
        for i, n in enumerate(((7, 5, 3), (6, 4, 2, 0))[not label])
    ]
    path = folder / "answers.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def trl_step(
    folder: Path,  # noqa: F811
    output: Path,
    method: str,
    data: Path,
    **options: object,
) -> dict[str, float]:
    """TRL's metrics of one step over all rows, with the reference `other`."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.experimental import cpo

    classes = {
        "dpo": (trl.DPOConfig, trl.DPOTrainer),
        "kto": (trl.KTOConfig, trl.KTOTrainer),
        "cpo": (cpo.CPOConfig, cpo.CPOTrainer),
    }
    make_config, trainer_class = classes[method]
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    roles = {
        "prompt": "user",
        "chosen": "assistant",
        "rejected": "assistant",
        "completion": "assistant",
    }
    chats = [
        {
            name: [{"role": roles[name], "content": text}] if name in roles else text
            for name, text in row.items()
        }
        for row in rows
    ]

    class InOrder(trainer_class):
        def _get_train_sampler(self, *_: object) -> torch.utils.data.SequentialSampler:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    config = make_config(
        output_dir=str(output),
        beta=OPTIONS["loss.beta"],
        max_grad_norm=0.0,
        max_steps=1,
        per_device_train_batch_size=len(rows),
        logging_steps=1,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    models = [
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        for name in ("model", "other")
    ]
    reference = {} if method == "cpo" else {"ref_model": models[1]}
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    trainer = InOrder(
        models[0],
        args=config,
        train_dataset=Dataset.from_list(chats),
        processing_class=tokenizer,
        **reference,
    )
    trainer.train()
    metrics: dict[str, float] = trainer.state.log_history[0]
    return metrics


BCO = preference_losses.bco_loss
WEIGHTS = {"desirable_weight": 1.5, "undesirable_weight": 0.7}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "ours", "method", "theirs"),
    [
        ("dpo", {"kind": "dpo"}, "dpo", {}),
        ("dpo", {"kind": "ipo"}, "dpo", {"loss_type": ["ipo"]}),
        ("dpo", {"kind": "hinge"}, "dpo", {"loss_type": ["hinge"]}),
        ("dpo", {"kind": "robust", **SMOOTHING}, "dpo", {"loss_type": ["robust"], **SMOOTHING}),
        ("dpo", {"kind": "dpo_normalized"}, "dpo", {"loss_type": ["sigmoid_norm"]}),
        ("dpo", {"kind": "exo", **SMOOTHING}, "dpo", {"loss_type": ["exo_pair"], **SMOOTHING}),
        ("dpo", {"kind": "nca"}, "dpo", {"loss_type": ["nca_pair"]}),
        ("dpo", {"kind": "bco"}, "dpo", {"loss_type": ["bco_pair"]}),
        ("dpo", {"kind": "apo_zero"}, "dpo", {"loss_type": ["apo_zero"]}),
        ("dpo", {"kind": "apo_down"}, "dpo", {"loss_type": ["apo_down"]}),
        ("dpo", {"kind": "sppo"}, "dpo", {"loss_type": ["sppo_hard"]}),
        (
            "dpo",
            {"kind": "discopop", "temperature": 0.2},
            "dpo",
            {"loss_type": ["discopop"], "discopop_tau": 0.2},
        ),
        ("dpo", {"kind": "aot"}, "dpo", {"loss_type": ["aot"]}),
        ("dpo", {"kind": "aot_unpaired"}, "dpo", {"loss_type": ["aot_unpaired"]}),
        (
            "dpo",
            {"kind": "mix", "mix": ["dpo=0.8", "bco=0.2", "sft=1"]},
            "dpo",
            {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
        ),
        ("dpo", {"verbose_weight": 0.3}, "dpo", {"ld_alpha": 0.3}),
        (
            "simpo",
            {"gamma": 0.4},
            "cpo",
            {"loss_type": "simpo", "simpo_gamma": 0.4, "cpo_alpha": 0.0},
        ),
        (
            "simpo",
            {"kind": "cpo", "weight": 0.7},
            "cpo",
            {"loss_type": "sigmoid", "cpo_alpha": 0.7},
        ),
        ("kto", WEIGHTS, "kto", WEIGHTS),
    ],
    ids=lambda value: value.get("kind") if isinstance(value, dict) else None,
)
def test_one_batch_matches_trl(folder, tmp_path, monkeypatch, config, ours, method, theirs):  # noqa: F811
    """One window with all rows against TRL's padded batch, with another model as the reference.
    Both compute in float32: a reward is 0.3 times the difference of two log-probabilities of up to
    150, each rounded to 1e-5. CPO gets chosen answers of one length, since TRL's likelihood is a
    mean over tokens, and ours a mean over answers. TRL's `bco_pair` has no shift of rewards."""
    monkeypatch.setattr(
        preference_losses, "bco_loss", lambda chosen, rejected, shift: BCO(chosen, rejected, 0.0)
    )
    pairs = [
        {
            "prompt": f"Is {n} big?",
            "chosen": "No, "
            + "quite " * (2 if ours.get("kind") in ("cpo", "mix") else n)
            + "small.",
            "rejected": "No, it is " + "very " * (n % 3) + "big.",
        }
        for n in range(6)
    ]
    data = write_answers(folder) if config == "kto" else tmp_path / "pairs.jsonl"
    if config != "kto":
        data.write_text("".join(f"{json.dumps(row)}\n" for row in pairs))
    options = {f"loss__{name}": value for name, value in ours.items()}
    train(
        folder,
        tmp_path,
        config,
        dataloader__dataset=[data],
        reference__path=folder / "other",
        **STEP,
        **options,
    )
    expected = trl_step(folder, tmp_path / "trl", method, data, **theirs)
    names = KTO_NUMBERS if config == "kto" else PAIR_NUMBERS
    ((_, *measured),) = read_metrics(tmp_path, *names)
    assert measured == pytest.approx([expected[name] for name in names], rel=1e-5, abs=1e-5)
    assert all(
        abs(value) > 1e-3
        for name, value in zip(names, measured, strict=True)
        if "accuracies" not in name
    )


@pytest.mark.slow
def test_trl_ignores_label_smoothing_of_the_sigmoid_loss(folder, tmp_path):  # noqa: F811
    """So cdpo has no counterpart in TRL, and is compared with its formula only."""
    plain, smoothed = (
        trl_step(folder, tmp_path / str(value), "dpo", folder / "odd.jsonl", label_smoothing=value)
        for value in (0.0, 0.1)
    )
    assert smoothed["loss"] == plain["loss"]
    assert smoothed["grad_norm"] == plain["grad_norm"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cached", "adapters_off"])
def test_references_without_a_second_model(folder, tmp_path, kind):  # noqa: F811
    """Equal to a second model, except for rounding: cached sums are of other windows."""
    adapters = {"config": "dpo_lora"} if kind == "adapters_off" else {"config": "dpo"}
    options = {
        "dataloader__packing": "none",
        "training__local_batch_size": 4,
        "training__global_batch_size": 4,
    }
    train(folder, tmp_path / "model", **adapters, reference__kind="model", **options)
    trainer = train(folder, tmp_path / kind, **adapters, reference__kind=kind, **options)
    assert all(name == "model" or not model.parts for name, model in trainer.models.items())
    rows = [read_metrics(tmp_path / name, *PAIR_NUMBERS, "kl") for name in ("model", kind)]
    for row, expected in zip(*rows, strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert abs(rows[0][-1][3]) > 1e-3


@pytest.mark.slow
def test_the_reference_follows_the_model(folder, tmp_path):  # noqa: F811
    """After two steps the reference is the model, or half of it, and a resumed run has it."""
    options = {"training__steps": 2, "reference__update_every": 2, "checkpoint__interval": 2}
    initial = train(folder, tmp_path / "never", "dpo", training__steps=1, optimizer__lr=0.0)
    start = initial.models["reference"].parts[0].state_dict()
    for share in (1.0, 0.5):
        trainer = train(
            folder, tmp_path / str(share), "dpo", **options, reference__update_share=share
        )
        trained, moved = (
            trainer.models[name].parts[0].state_dict() for name in ("model", "reference")
        )
        for name, old in start.items():
            torch.testing.assert_close(moved[name], old + share * (trained[name] - old))
        assert any((trained[name] - old).abs().max() > 1e-4 for name, old in start.items())
    with killed_in(PreferenceTrainer, "train_step", 4):
        train(folder, tmp_path / "stopped", "dpo", **{**options, "training__steps": 4})
    for name in ("stopped", "straight"):
        train(folder, tmp_path / name, "dpo", **{**options, "training__steps": 4})
    numbers = ("loss", "grad_norm", "kl")
    assert read_metrics(tmp_path / "stopped", *numbers) == read_metrics(
        tmp_path / "straight", *numbers
    )
    with pytest.raises(UserError, match=r"--reference\.update_every 2 copies the trained weights"):
        train(folder, tmp_path / "lora", "dpo_lora", **options)
    rounded = {"training__mixed_precision_param": "bfloat16", "reference__update_share": 0.01}
    with pytest.raises(UserError, match=r"--reference\.update_share 0\.01: .* type bfloat16"):
        train(folder, tmp_path / "bfloat16", "dpo", **options, **rounded)


def likelihoods(
    model: torch.nn.Module, tokenizer: Any, row: dict[str, str], share: float
) -> list[tuple[torch.Tensor, int]]:
    """For each answer of a pair, its log-probability and number of tokens by a model of
    transformers. Tokens beyond the length of the shorter answer have the weight `share` (LD-DPO,
    arXiv:2409.06411)."""
    sides = []
    for side in ("chosen", "rejected"):
        turns = [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row[side]},
        ]
        start, whole = (
            tokenizer.apply_chat_template(part, return_dict=False) for part in (turns[:1], turns)
        )
        assert whole[: len(start)] == start
        ids = torch.tensor([whole])
        log_probs = model(ids).logits[0, :-1].log_softmax(-1)
        sides.append(log_probs.gather(1, ids[0, 1:, None])[len(start) - 1 :, 0])
    shorter = min(map(len, sides))
    return [(side[:shorter].sum() + share * side[shorter:].sum(), len(side)) for side in sides]


def pair_loss(kind: str, chosen: tuple[Any, int], rejected: tuple[Any, int]) -> torch.Tensor:
    """The publications' formulas, with the weights and the margin 1."""
    beta = OPTIONS["loss.beta"]
    likely, unlikely = (total / n_tokens for total, n_tokens in (chosen, rejected))
    if kind == "simpo":
        return -logsigmoid(beta * (likely - unlikely) - 1.0)
    if kind == "cpo":
        return -logsigmoid(beta * (chosen[0] - rejected[0])) - likely
    odds = [mean - torch.log(1 - mean.exp()) for mean in (likely, unlikely)]
    return -likely - logsigmoid(odds[0] - odds[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["simpo", "orpo", "cpo"])
def test_long_answers_may_count_less_without_a_reference(kind, folder, tmp_path):  # noqa: F811
    """Loss and norm of the gradients are those of the formulas in float64; the run is in float32,
    whose rounding is below 1e-6."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    data = [json.loads(line) for line in (folder / "odd.jsonl").read_text().splitlines()]
    found = []
    for share in (1.0, 0.3):
        dump = tmp_path / str(share)
        train(folder, dump, "dpo", loss__kind=kind, loss__verbose_weight=share, **STEP)
        ((_, *measured),) = read_metrics(dump, "loss", "grad_norm")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder / "model", dtype=torch.float64
        )
        losses = [pair_loss(kind, *likelihoods(model, tokenizer, row, share)) for row in data]
        loss = torch.stack(losses).mean()
        loss.backward()
        gradients = [one.grad.flatten() for one in model.parameters() if one.grad is not None]
        norm = torch.cat(gradients).norm()
        assert measured == pytest.approx([loss.item(), norm.item()], rel=1e-5)
        found.append(loss.item())
    assert abs(found[0] - found[1]) > 1e-3


PROMPTS = [{"prompt": f"Is {i} " + "very " * (i % 3) + "big?"} for i in range(8)]


def train_online(folder: Path, dump: Path, **options: object) -> PreferenceTrainer:  # noqa: F811
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in PROMPTS))
    rollout = {"rollout__max_new_tokens": 8, "rewards": ["length=20"], "rollout__group_size": 3}
    common = {"dataloader__dataset": [folder / "prompts.jsonl"], "training__seq_len": 64}
    return train(folder, dump, "online_dpo", **{**rollout, **common, **options})


def test_online_pairs_are_the_best_and_the_worst_answers(folder, tmp_path, monkeypatch):  # noqa: F811
    seen = []
    sample = OnlinePreferenceTrainer.sample
    monkeypatch.setattr(
        OnlinePreferenceTrainer,
        "sample",
        lambda self, *args: seen.append(sample(self, *args)) or seen[-1],
    )
    batches = []
    compute = PreferenceTrainer.compute_loss
    monkeypatch.setattr(
        PreferenceTrainer,
        "compute_loss",
        lambda self, batch: batches.append(batch) or compute(self, batch),
    )
    train_online(folder, tmp_path, training__steps=1, training__global_batch_size=2)
    groups = [group for sampled in seen for group in sampled]
    expected = [
        (sorted(group, key=lambda t: -t.reward)[0], sorted(group, key=lambda t: t.reward)[0])
        for group in groups
        if len({t.reward for t in group}) > 1
    ]
    found = set()
    for batch in batches:
        for tokens, numbers in zip(batch["input"], batch["sequences"], strict=True):
            for pair in range(int(numbers.max()) // 2 + 1):
                sides = [tokens[numbers == 2 * pair + side].tolist() for side in (0, 1)]
                found.add(tuple(tuple(side) for side in sides))
    for best, worst in expected:
        assert any(
            list(c)[: len(best.tokens) - 1] == best.tokens[:-1] and list(r) == worst.tokens[:-1]
            for c, r in found
        )
    assert len(expected) >= 2
    names = ("pairs", "overlong", "no_verdict", "rewards/length", "reward")
    ((_, pairs, overlong, no_verdict, named, reward),) = read_metrics(tmp_path, *names)
    assert pairs == len(expected) / len(groups) and (overlong, no_verdict) == (0, 0)
    assert named == reward == pytest.approx(mean(t.reward for group in groups for t in group))
    lines = (tmp_path / "completions.jsonl").read_text().splitlines()
    assert [json.loads(line)["tokens"] for line in lines] == [t.tokens for t in groups[0][:2]]


@pytest.mark.slow
def test_online_runs_resume_exactly_and_refuse_equal_rewards(folder, tmp_path):  # noqa: F811
    options = {"training__steps": 4, "checkpoint__interval": 2, "training__global_batch_size": 2}
    options |= {"loss__kind": "ipo"}
    train_online(folder, tmp_path / "straight", **options)
    with killed_in(PreferenceTrainer, "train_step", 4):
        train_online(folder, tmp_path / "stopped", **options)
    train_online(folder, tmp_path / "stopped", **options)
    names = ("loss", "grad_norm", "rewards/chosen", "kl", "reward", "pairs")
    assert read_metrics(tmp_path / "stopped", *names) == read_metrics(tmp_path / "straight", *names)
    with pytest.raises(UserError, match="the rewards of each prompt's answers were equal in 10"):
        train_online(folder, tmp_path / "equal", rewards=["pattern=^"])
    with pytest.raises(UserError, match=r"--rollout\.group_size is 1, but must be 2 or more"):
        train_online(folder, tmp_path / "one", rollout__group_size=1)


def only_of_the_model(trainer: PreferenceTrainer, model: str, *arguments: object) -> torch.Tensor:
    assert model == "model"
    return LOG_PROBS(trainer, model, *arguments)


LOG_PROBS = PreferenceTrainer.log_probs


@pytest.mark.slow
def test_a_cached_reference_is_computed_once(folder, tmp_path, monkeypatch, caplog):  # noqa: F811
    options = {
        "reference__kind": "cached",
        "dataloader__cache_dir": tmp_path / "cache",
        "training__steps": 2,
    }
    options |= {"checkpoint__last_save_in_hf": False, "checkpoint__export_dtype": "None"}
    caplog.set_level("INFO", logger="torchtitan")
    train(folder, tmp_path / "first", "dpo", **options)
    assert sum(" rows kept " in line for line in caplog.messages) == 1  # of the training data
    resumed = train(folder, tmp_path / "first", "dpo", **{**options, "training__steps": 3})
    assert resumed.step == 3
    monkeypatch.setattr(PreferenceTrainer, "log_probs", only_of_the_model)
    train(folder, tmp_path / "second", "dpo", **options)
    train(folder, tmp_path / "second", "dpo", **{**options, "training__steps": 3})  # resumes
    assert read_metrics(tmp_path / "second", "loss") == read_metrics(tmp_path / "first", "loss")


@pytest.mark.slow
def test_kto_compares_with_other_prompts_if_prompts_repeat(folder, tmp_path, monkeypatch):  # noqa: F811
    """The estimate of arXiv:2402.01306, section 4.1, has unrelated outputs, so not those of the
    same prompt, which TRL takes. Computed by transformers in float64."""
    from transformers import AutoModelForCausalLM

    answers = {(7, 5, 3, 6, 4, 2)[i]: i % 3 for i in range(6)}  # number of words → prompt
    rows = [
        {
            "prompt": f"Is {i} a big number?",
            "completion": "No, " + "quite " * n + "small.",
            "label": n % 2 == 1,
        }
        for n, i in answers.items()
    ]
    (data := tmp_path / "repeated.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in rows)
    )
    seen = []
    estimate = KTOTrainer.estimate_kl
    monkeypatch.setattr(
        KTOTrainer,
        "estimate_kl",
        lambda self, batches: seen.append(batches) or estimate(self, batches),
    )
    options = {"dataloader__dataset": [data], "reference__path": folder / "other", **STEP}
    trainer = train(folder, tmp_path / "run", "kto", **options)
    ((batch,),) = seen
    models = [
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64)
        for name in ("model", "other")
    ]
    bounds = batch["mismatched_attention"].cu_seqlens.tolist()
    total, n_pairs = 0.0, 0
    for start, end in zip(bounds, bounds[1:], strict=False):
        tokens, labels = (batch[f"mismatched_{name}"][:, start:end] for name in ("input", "labels"))
        if (labels < 0).all():
            continue
        text = trainer.tokenizer.decode(tokens[0].tolist())
        assert f"Is {answers[text.count('quite')]} a" not in text
        n_pairs += 1
        with torch.no_grad():
            scores = [model(tokens).logits.log_softmax(-1) for model in models]
        own, reference = (
            x[labels >= 0].gather(1, labels[labels >= 0][:, None]).sum() for x in scores
        )
        total += (own - reference).item()
    ((_, kl),) = read_metrics(tmp_path / "run", "kl")
    assert n_pairs == len(rows)
    assert kl == pytest.approx(max(total / n_pairs, 0.0), rel=1e-5, abs=1e-5)
    assert kl > 1e-3


@pytest.mark.slow
def test_kto_on_two_processes_matches_one(folder, tmp_path):  # noqa: F811
    """The estimate of the divergence covers the global batch, so it does not depend on the
    layout."""
    options = {"dataloader__dataset": [folder / "pairs.jsonl"], "training__seq_len": 64}
    options |= {"training__global_batch_size": 2}
    train(folder, tmp_path / "one", "kto", **options)
    run_processes(train_kto_on_ranks, 2, folder, tmp_path / "two", options)
    rows = [read_metrics(tmp_path / name, *KTO_NUMBERS) for name in ("two", "one")]
    for row, expected in zip(*rows, strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-5)


def train_kto_on_ranks(folder: Path, dump: Path, options: dict[str, object]) -> None:  # noqa: F811
    trainer = train(folder, dump, "kto", **options)
    assert isinstance(trainer, KTOTrainer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "options"),
    [
        ("dpo", {"reference__kind": "cached"}),
        ("dpo_lora", {}),
        (
            "dpo_lora",
            {
                "parallelism__tensor_parallel_degree": 2,
                "parallelism__data_parallel_shard_degree": 1,
            },
        ),
        (
            "kto",
            {
                "parallelism__tensor_parallel_degree": 2,
                "parallelism__data_parallel_shard_degree": 1,
            },
        ),
    ],
    ids=["FSDP, cached", "FSDP, adapters off", "TP, adapters off", "TP, KTO"],
)
def test_two_processes_match_one(folder, tmp_path, config, options):  # noqa: F811
    """Tolerances as for KTO above: another order of sums in four steps of Adam."""
    options |= {"dataloader__dataset": [folder / "pairs.jsonl"], "training__seq_len": 64}
    options |= {"training__global_batch_size": 2}
    one = {name: value for name, value in options.items() if not name.startswith("parallelism")}
    if "reference__kind" in options:  # each fills its own cache
        one["dataloader__cache_dir"], options["dataloader__cache_dir"] = (
            tmp_path / "cache1",
            tmp_path / "cache2",
        )
    train(folder, tmp_path / "one", config, **one)
    run_processes(train_on_ranks, 2, folder, tmp_path / "two", config, options)
    names = KTO_NUMBERS if config == "kto" else [*PAIR_NUMBERS, "kl"]
    rows = [read_metrics(tmp_path / name, *names) for name in ("two", "one")]
    for row, expected in zip(*rows, strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-5)


def train_on_ranks(folder: Path, dump: Path, config: str, options: dict[str, object]) -> None:  # noqa: F811
    train(folder, dump, config, **options)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["kto", "dpo_lora"])
def test_packed_runs_resume_exactly(folder, tmp_path, config):  # noqa: F811
    options = {
        "dataloader__dataset": [folder / "pairs.jsonl"],
        "training__seq_len": 64,
        "checkpoint__interval": 2,
    }
    train(folder, tmp_path / "straight", config, **options)
    with killed_in(PreferenceTrainer, "train_step", 4):
        train(folder, tmp_path / "stopped", config, **options)
    train(folder, tmp_path / "stopped", config, **options)
    names = ("loss", "grad_norm", "rewards/chosen", "rewards/rejected", "kl")
    assert read_metrics(tmp_path / "stopped", *names) == read_metrics(tmp_path / "straight", *names)


def test_invalid_combinations_are_rejected(folder, tmp_path):  # noqa: F811
    with pytest.raises(
        UserError, match="--reference.kind adapters_off is the base model of adapters"
    ):
        train(folder, tmp_path, "dpo", reference__kind="adapters_off")
    with pytest.raises(UserError, match="without --reference.path and --reference.offload"):
        train(folder, tmp_path, "dpo_lora", reference__kind="adapters_off", reference__offload=True)
    with pytest.raises(UserError, match="--reference.kind cached has no answers to other prompts"):
        train(folder, tmp_path, "kto", reference__kind="cached")
    with pytest.raises(
        UserError, match="--dataloader.packing none leaves no answers to other prompts"
    ):
        train(folder, tmp_path, "kto", dataloader__packing="none")
    with pytest.raises(
        UserError, match=r"--loss\.label_smoothing is 0\.5, but must be from 0 to below 0\.5"
    ):
        train(folder, tmp_path, "dpo", loss__kind="cdpo", loss__label_smoothing=0.5)
    with pytest.raises(
        UserError,
        match=r"--loss\.kind robust: --loss\.label_smoothing is 0\.0, but must be above 0; dpo "
        r"does not use it",
    ):
        train(folder, tmp_path, "dpo", loss__kind="robust")
    with pytest.raises(
        UserError, match=r"kind dpo: .* is 0\.1, but must be 0; cdpo, robust, exo use it"
    ):
        train(folder, tmp_path, "dpo", loss__label_smoothing=0.1)


def test_an_option_of_another_method_names_help(folder, tmp_path):  # noqa: F811
    with pytest.raises(
        UserError, match=r"^unknown option --loss\.kind; see torchtitan train --help$"
    ):
        train(folder, tmp_path, "kto", loss__kind="dpo")


def test_kto_warns_of_windows_with_one_prompt(folder, tmp_path, caplog):  # noqa: F811
    options = {
        "training__seq_len": 32,
        "dataloader__dataset": [folder / "pairs.jsonl"],
        "loss__beta": 0.1,
    }
    trainer = train(folder, tmp_path, "kto", **STEP, **options)
    assert "no window has answers to two prompts" in caplog.text
    assert trainer.kl == 0


@pytest.mark.parametrize(("kept", "lacking"), [(True, "undesirable"), (False, "desirable")])
def test_kto_warns_of_answers_of_one_kind(folder, tmp_path, caplog, kept, lacking):  # noqa: F811
    rows = [
        line
        for line in write_answers(folder).read_text().splitlines()
        if json.loads(line)["label"] is kept
    ]
    (tmp_path / "some.jsonl").write_text("\n".join(rows))
    train(folder, tmp_path, "kto", **STEP, dataloader__dataset=[tmp_path / "some.jsonl"])
    assert f"KTO also needs {lacking} answers" in caplog.text
    caplog.clear()
    train(folder, tmp_path / "both", "kto", **STEP, dataloader__dataset=[folder / "answers.jsonl"])
    assert "KTO also needs" not in caplog.text


def test_pairs_without_a_difference_are_refused(folder, tmp_path):  # noqa: F811
    path = tmp_path / "equal.jsonl"
    path.write_text(json.dumps({"prompt": "Hi?", "chosen": "Yes.", "rejected": "Yes."}) + "\n")
    with pytest.raises(UserError, match="chosen and rejected are equal"):
        train(folder, tmp_path, "dpo", dataloader__dataset=[path])
