"""The configuration `dial`: the transfer of hyper-parameters over width and depth, and the rules."""

import dataclasses
import math
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import torchtitan.models.deepseek_v3
import torchtitan.models.gemma
import torchtitan.models.granite
import torchtitan.models.llama3
import torchtitan.models.mixtral
import torchtitan.models.olmo
import torchtitan.models.qwen3
import torchtitan.models.qwen3_5
from torchtitan.config.manager import ConfigManager
from torchtitan.distributed import initialize_weights
from torchtitan.dry_run.report import dry_run
from torchtitan.foresight import scaling
from torchtitan.foresight.config_registry import dial
from torchtitan.foresight.dial import FORECAST, cost_of, values_of
from torchtitan.foresight.sizes import parameters_per_token, sized, small_flavor
from torchtitan.foresight.transfer import on_meta, transfers
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer

FAMILIES = [
    torchtitan.models.llama3,
    torchtitan.models.qwen3,
    torchtitan.models.gemma,
    torchtitan.models.granite,
    torchtitan.models.olmo,
    torchtitan.models.mixtral,
]
OF_SEVERAL_KINDS = [torchtitan.models.qwen3_5, torchtitan.models.deepseek_v3]
"""Families whose first layer does not have all parameters, or has numbered parts."""

VOCABULARY = 61


def parse(*words: str) -> Trainer.Config:
    config: Trainer.Config = (
        ConfigManager().parse_args(["--module", "llama3", "--config", "dial", *words]).config
    )
    return config


def changes_of_logits(
    family, width_per_layer: int, layers: int = 2, *, transfers: bool = True, muon: bool = False
) -> tuple[float, float]:
    """Train a model of random tokens for three steps. Return the root mean square of its first
    logits, and of their change."""
    config = dial(dial=layers, width_per_layer=width_per_layer, family=family, muon=muon)
    model_config = config.model_spec.model
    model_config.vocab_size = VOCABULARY
    model = model_config.build()
    if transfers:
        config.model_converters[0].build().convert(model)
    else:
        config.optimizer.param_groups = {}
    config.optimizer.implementation = "for-loop"
    initialize_weights(model, seed=1)
    optimizer = config.optimizer.build(model_parts=[model])
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (4, 33), generator=generator)

    def logits() -> torch.Tensor:
        return model(tokens[:, :-1])

    before = logits().detach()
    for _ in range(3):
        F.cross_entropy(logits().flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    change = logits().detach() - before
    return float(before.square().mean().sqrt()), float(change.square().mean().sqrt())


@pytest.mark.parametrize(
    "family",
    [FAMILIES[0], *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES[1:])],
    ids=lambda family: family.__name__.split(".")[-1],
)
def test_updates_have_the_same_effect_at_every_width(family):
    """The coordinate check of muP (arXiv:2203.03466, appendix D.1): over a factor of 8 in width,
    the change of the logits keeps its size up to noise, and initial logits do not grow. Without
    transfer, the change grows by more (the next test)."""
    first, narrow = changes_of_logits(family, 64)
    last, wide = changes_of_logits(family, 512)
    assert 1 / 1.8 < wide / narrow < 1.8
    assert last < 1.3 * first


@pytest.mark.slow
def test_layers_of_all_kinds_transfer():
    """The same for Qwen 3.5, whose fourth layer is the first one with full attention, over a factor
    of 4 in width. If that layer kept the rates of the base, the change would grow by 1.43."""
    family = torchtitan.models.qwen3_5
    (_, narrow), (_, wide) = (changes_of_logits(family, width, 4) for width in (64, 256))
    assert 1 / 1.25 < wide / narrow < 1.25


def test_updates_of_muon_have_the_same_effect_at_every_width():
    """The same check over a factor of 4 in width, where orthogonal updates in bfloat16 are fast."""
    family = torchtitan.models.llama3
    narrow, wide = (changes_of_logits(family, width, muon=True)[1] for width in (16, 64))
    assert 1 / 1.5 < wide / narrow < 1.5


@pytest.mark.parametrize(("muon", "growth"), [(False, 2.5), (True, 1.7)])
def test_without_transfer_updates_grow_with_width(muon, growth):
    """Over a factor of 8 in width, or of 4 with Muon."""
    narrow, wide = (
        changes_of_logits(torchtitan.models.llama3, width, transfers=False, muon=muon)[1]
        for width in ((16, 64) if muon else (64, 512))
    )
    assert wide / narrow > growth


def test_updates_have_the_same_effect_at_every_depth():
    """The same over depth, with a width that stays: 128 at 2 layers, and at 8."""
    family = torchtitan.models.llama3
    shallow, deep = (
        changes_of_logits(family, width, layers)[1] for width, layers in ((64, 2), (16, 8))
    )
    assert 1 / 1.8 < deep / shallow < 1.8


@pytest.mark.parametrize(
    "family", FAMILIES + OF_SEVERAL_KINDS, ids=lambda family: family.__name__.split(".")[-1]
)
def test_every_parameter_is_in_one_group_and_decays_alike(family):
    config = dial(dial=4, family=family)
    model = config.model_spec.model
    model.vocab_size = VOCABULARY
    with torch.device("meta"):
        parameters = dict(model.build().named_parameters())
    groups = config.optimizer.param_groups.values()
    for name, parameter in parameters.items():
        (group,) = [one for one in groups if re.search(one.pattern, name)]
        if parameter.dim() == 1 or re.search("bias|tok_embeddings", name):
            assert group.weight_decay_factor == 0.0
        else:  # AdamW multiplies weights by 1 - rate x decay
            assert group.lr_factor * group.weight_decay_factor == pytest.approx(1.0)


def rates_of(config: Trainer.Config) -> Callable[[str], float]:
    """Return a function from a parameter's name to the factor of its rate."""

    def rate(name: str) -> float:
        groups = config.optimizer.param_groups.values()
        return next(one.lr_factor for one in groups if re.search(one.pattern, name))

    return rate


def test_rates_are_those_of_the_tables():
    """Four layers of width 256, against a base of 2 layers of width 128: by muP's table 3 and
    CompleteP's table 1, with the multiplier of the branch in its last matrix."""
    config = dial(dial=4, family=torchtitan.models.llama3)
    rate = rates_of(config)
    assert rate("tok_embeddings.weight") == rate("layers.3.ffn_norm.weight") == 1.0
    assert rate("layers.0.attention.wq.weight") == rate("head.output.weight") == 1 / 2
    assert rate("layers.3.attention.wo.weight") == rate("layers.0.feed_forward.w2.weight") == 1 / 4

    model = config.model_spec.model
    model.vocab_size = VOCABULARY
    built = model.build()
    config.model_converters[0].build().convert(built)
    initialize_weights(built, seed=0)
    stds = {name: float(parameter.detach().std()) for name, parameter in built.named_parameters()}
    # the family's own: 0.02 inside, 0.02 / sqrt(2) in w2, w3 and wo of layer 0, and less in deeper
    # layers, which would be a second factor of depth; 1 / (4 sqrt(width)) for logits
    for layer in range(4):
        for name, std in {"attention.wq": 0.02, "feed_forward.w3": 0.02 / math.sqrt(2)}.items():
            found = stds[f"layers.{layer}.{name}.weight"]
            assert found == pytest.approx(std / math.sqrt(2), rel=0.05)
        for name in ("attention.wo", "feed_forward.w2"):
            assert stds[f"layers.{layer}.{name}.weight"] == pytest.approx(0.02 / 2 / 2, rel=0.05)
    assert stds["head.output.weight"] == pytest.approx(1 / 4 / math.sqrt(128) / 2, rel=0.05)


def test_rates_of_muon_keep_the_spectral_norm_of_updates_in_proportion():
    """Four layers of width 512, against 128: Muon's update has the norm sqrt(max(m, n)) times the
    rate, and must have sqrt(m / n), times the factor of depth of the branches' last matrices; the
    head is AdamW's."""
    config = dial(dial=4, width_per_layer=128, family=torchtitan.models.llama3, muon=True)
    assert config.optimizer.name == "Muon"
    rate = rates_of(config)
    assert rate("layers.0.attention.wq.weight") == rate("layers.1.feed_forward.w1.weight") == 1 / 2
    assert rate("layers.3.attention.wo.weight") == rate("layers.0.feed_forward.w2.weight") == 1 / 4
    assert rate("head.output.weight") == 1 / 4 and rate("tok_embeddings.weight") == 1.0
    family = torchtitan.models.deepseek_v3
    latents = rates_of(dial(dial=4, family=family, muon=True))
    flavor = dataclasses.replace(small_flavor(family), vocab_size=VOCABULARY)
    sizes = scaling.sizes(4), scaling.base_sizes(4)
    model, base = (on_meta(sized(flavor, one)) for one in sizes)
    name = "layers.0.attention.q_latent.0.weight"  # from the width to a constant one
    shapes = [dict(one.named_parameters())[name].shape for one in (model, base)]
    norms = [math.sqrt(max(m, n)) / math.sqrt(m / n) for m, n in shapes]
    assert latents(name) == pytest.approx(norms[1] / norms[0])


@pytest.mark.parametrize("words", [["--muon"], ["--muon=True"], ["--config_file"]])
def test_muon_is_chosen_on_the_command_line_or_in_a_file(words, tmp_path):
    (tmp_path / "run.yaml").write_text("muon: true")
    words = [*words, *([str(tmp_path / "run.yaml")] if words == ["--config_file"] else [])]
    config = parse("--dial=4", "--width_per_layer=128", *words)
    assert config.muon and config.optimizer.name == "Muon"
    assert config.optimizer.lr == scaling.MUON_BASE_RATE
    assert rates_of(config)("layers.0.attention.wq.weight") == 1 / 2
    config = parse("--dial=4", "--width_per_layer=128", *words, "--no-muon")
    assert not config.muon and config.optimizer.name == "AdamW"
    assert config.optimizer.lr == scaling.BASE_RATE
    assert rates_of(config)("layers.0.attention.wq.weight") == 1 / 4


def test_a_layer_that_the_smallest_model_lacks_is_transferred():
    """Qwen 3.5's fourth layer is its first one with full attention; here width 256, 4 layers."""
    rate = rates_of(dial(dial=4, family=torchtitan.models.qwen3_5))
    assert rate("layers.3.attention.wq.weight") == rate("layers.0.attention.in_z.weight") == 1 / 2
    assert rate("layers.3.attention.wo.weight") == rate("layers.0.attention.out.weight") == 1 / 4


def test_numbered_parts_of_a_layer_keep_their_own_rates():
    """DeepSeek's queries: a matrix to a latent of constant width, its norm, and a matrix from it,
    whose inputs do not grow."""
    config = dial(dial=4, family=torchtitan.models.deepseek_v3)
    rate = rates_of(config)
    assert rate("layers.0.attention.q_latent.0.weight") == 1 / 2
    assert rate("layers.0.attention.q_latent.1.weight") == 1.0
    assert rate("layers.0.attention.q_latent.2.weight") == 1.0


def test_the_base_size_is_the_family_itself():
    """Except for later layers, which start like the first."""
    config = dial(dial=2, family=torchtitan.models.llama3)
    (scale,) = config.model_converters[0].scales.values()
    assert scale.std == pytest.approx(0.02 / math.sqrt(2)) and scale.factor == 1.0
    matches = [name for name in ("wq", "wo", "w1", "w2", "w3") if name in scale.pattern]
    assert matches == ["wo", "w2", "w3"]
    assert {group.lr_factor for group in config.optimizer.param_groups.values()} == {1.0}


def models_of(family, width_per_layer: int = 64):
    """Return a model of 2 layers and its base, without memory."""
    sizes = [scaling.sizes(2, width_per_layer), scaling.base_sizes(2, width_per_layer)]
    flavor = dataclasses.replace(small_flavor(family), vocab_size=VOCABULARY)
    return [on_meta(sized(flavor, one)) for one in sizes]


def test_a_parameter_without_counterpart_is_refused():
    model, _ = models_of(torchtitan.models.qwen3)
    _, base = models_of(torchtitan.models.llama3)
    with pytest.raises(UserError, match="no layers.0.attention.q_norm.weight at the base size"):
        transfers(model, base)


def test_a_branch_whose_last_matrix_is_unknown_is_refused():
    models = models_of(torchtitan.models.llama3)
    for model in models:
        block = model.layers["1"]
        block.mixer, block.attention = block.attention, torch.nn.Identity()
    with pytest.raises(UserError, match=r"residual branch layers.1.mixer; it knows attention.wo"):
        transfers(*models)


def test_a_budget_is_used_by_the_largest_model_that_it_pays():
    config = parse("--budget", "1e15", "--tokens_per_parameter", "10")
    model = config.model_spec.model
    model.vocab_size = 2048
    parameters = parameters_per_token(model)
    training = config.training
    tokens = training.steps * training.global_batch_size * training.seq_len
    assert 6 * parameters * tokens == pytest.approx(1e15, rel=0.01)
    assert tokens / parameters >= 10
    larger = dial(dial=model.n_layers + 1, family=torchtitan.models.llama3).model_spec.model
    larger.vocab_size = 2048
    assert 6 * 10 * parameters_per_token(larger) ** 2 > 1e15


def test_the_named_device_decides_the_precision():
    planned = parse("--hours", "0.001", "--device", "h100")
    assert planned.training.mixed_precision_param == "bfloat16" and planned.compile.enable
    here = parse("--dial", "2", "--device", "cpu")
    assert here.training.mixed_precision_param == "float32" and not here.compile.enable


@pytest.mark.parametrize("window", [None, 1024])
def test_hours_pay_for_attention_too(window):
    """The FLOPs of the run, with attention, are those of the devices at 40 % of their peak; one
    layer more would cost too much at 20 tokens per parameter."""
    words = ("--hours", "0.001", "--device", "h100", "--devices", "2")
    config = parse(*words, *(["--window", str(window)] if window else []))
    paid = 0.001 * 3600 * 2 * 0.4 * 989e12
    config.model_spec.model.vocab_size = 2048
    cost = cost_of(config, 2)
    assert cost.flops == pytest.approx(paid, rel=0.01)  # whole steps
    assert cost.flops > 1.1 * 6 * cost.parameters * cost.tokens
    assert cost.tokens / cost.parameters >= 20
    larger = parse(
        "--dial", str(config.model_spec.model.n_layers + 1), "--window", str(window or 256)
    )
    larger.model_spec.model.vocab_size = 2048
    assert cost_of(larger).flops > paid


def test_the_batch_follows_the_window():
    """In tokens, it is the same; and a table row names the rule's number when devices round it."""
    plain, longer = parse("--dial", "3"), parse("--dial", "3", "--window", "1024")
    assert longer.training.seq_len == 1024
    tokens = [one.training.seq_len * one.training.global_batch_size for one in (plain, longer)]
    assert tokens[1] == pytest.approx(tokens[0], rel=1 / 16)  # a window of more or less
    many = parse("--dial", "3", "--devices", "512")
    many.model_spec.model.vocab_size = 2048
    cost = cost_of(many, 512)
    batch = values_of(many, cost, 512)["batch"]
    assert batch.startswith("512 windows, 131,072 tokens (by the rule ")
    assert f"{scaling.batch_tokens(cost.tokens):,.0f}" in batch
    with pytest.raises(UserError, match="--window is 0"):
        parse("--window", "0")


def test_values_can_be_overridden_and_saved(tmp_path):
    words = ["--module", "llama3", "--config", "dial", "--dial", "3", "--width_per_layer", "32"]
    resolved = ConfigManager().parse_args([*words, "--optimizer.lr", "1e-3"])
    assert resolved.config.model_spec.model.dim == 96 and resolved.config.optimizer.lr == 1e-3
    resolved.save(tmp_path / "run.yaml")
    again = ConfigManager().parse_args(["--config_file", str(tmp_path / "run.yaml")]).config
    assert again.to_dict() == resolved.config.to_dict()


def test_the_schedule_of_the_sources():
    """A run of 1e9 parameters and 2e10 tokens, computed by hand from the formulas."""
    plan = scaling.schedule(1e9, 2e10, seq_len=2048)
    batch = plan.windows * 2048
    assert batch == pytest.approx(0.58 * 2e10**0.571, rel=0.01)  # 444,000 tokens
    assert plan.steps == math.ceil(2e10 / batch)
    timescale = 1 / (plan.rate * plan.weight_decay) / plan.steps
    assert timescale == pytest.approx(1.084 * 20**-0.527)
    assert plan.warmup_steps == pytest.approx(0.05 * plan.steps, rel=0.01)
    assert plan.windows % plan.local_windows == 0
    short = scaling.schedule(1e9, 1e9, seq_len=2048)  # T is 1.084, and a run is no longer than 1
    assert short.rate * short.weight_decay * short.steps == pytest.approx(1.0)
    muon = scaling.schedule(1e9, 2e10, seq_len=2048, muon=True)
    assert muon.rate > plan.rate
    assert muon.rate * muon.weight_decay == pytest.approx(plan.rate * plan.weight_decay)
    shared = scaling.schedule(1e9, 2e10, seq_len=2048, devices=8)
    assert shared.windows % (8 * shared.local_windows) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dial", "0"], "--dial is 0"),
        (["--dial", "two"], "--dial is 'two'"),
        (["--dial", "4", "--budget", "1e18"], "--dial and --budget each choose the size"),
        (["--hours", "2"], "--hours 2 needs --device"),
        (["--budget", "1e3"], "--budget 1e.03 FLOPs is too small: one layer takes"),
        (
            ["--hours", "1e-9", "--device", "h100"],
            "--hours 1e-09 on 1 x h100: 1.42e.09 FLOPs is too",
        ),
        (["--hours", "inf", "--device", "h100"], "--hours is inf, but must be above 0 and below"),
        (["--width_per_layer", "30"], "--width_per_layer is 30"),
        (["--tokens_per_parameter", "0"], "--tokens_per_parameter is 0"),
        (["--module", "phi3"], "phi3 has others"),
        (["--module", "transformers"], "transformers has"),
    ],
)
def test_mistakes_are_named(words, message):
    if "transformers" in words:
        pytest.importorskip("transformers")
    with pytest.raises(UserError, match=message):
        parse(*words)


def test_a_dry_run_prints_the_dial(tmp_path, capsys):
    """It has a vocabulary, and no tokenizer whose files a ladder could be compared with."""
    words = ["--dial", "1", "--width_per_layer", "16", "--window", "64", "--devices", "2"]
    config = parse(*words, "--ladder", str(tmp_path / "none"), "--dump_folder", str(tmp_path))
    (report,) = dry_run(config, world_size=2)
    printed = capsys.readouterr().out
    assert "The dial" in printed and "predicted cost" in printed
    assert "predicted loss" not in printed and not (tmp_path / FORECAST).exists()
    assert report.peak_bytes > 0


def test_another_optimizer_is_refused(tmp_path):
    for words in (("--optimizer.name", "Muon"), ("--muon", "true", "--optimizer.name", "AdamW")):
        config = parse(*words, "--dump_folder", str(tmp_path))
        with pytest.raises(UserError, match=f"--optimizer.name {words[-1]}: the rates"):
            config.check(1)
