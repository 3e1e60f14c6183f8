"""Averages and merges of checkpoints, compared with float64 formulas in NumPy."""

import numpy as np
import pytest
import torch

from tests.cli.test_convert import convert, hf_tensors, logits_of
from tests.training import run, tiny_config
from torchtitan.components.weights.merge import MergedSource, linear, slerp, ties
from torchtitan.protocols.tensor_source import TensorSource, TensorSpec
from torchtitan.tools.errors import UserError

transformers = pytest.importorskip("transformers")


def save_models(folder, n_models, *, near=None, dtype=torch.float32, dim=32):
    """Save random Llama models, or, with `near`, models that differ from one by that much."""
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=dim,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    folders = []
    for seed in range(n_models):
        torch.manual_seed(0 if near else seed)
        model = transformers.LlamaForCausalLM(config)
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():  # norms too, which start at 1
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += (near or 0.1) * noise
        folders.append(folder / f"model{seed}")
        model.to(dtype).save_pretrained(folders[-1])
    return folders


def arrays(folder):
    return {name: tensor.double().numpy() for name, tensor in hf_tensors(folder).items()}


def assert_close(folder, expected, rtol=1e-6):
    found = arrays(folder)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        scale = np.abs(array).max()
        np.testing.assert_allclose(found[name], array, rtol=0, atol=rtol * scale, err_msg=name)


def test_average_equals_float64(tmp_path):
    """The mean of bfloat16 weights is rounded once, from float32."""
    first, *others = save_models(tmp_path, 3, dtype=torch.bfloat16)
    assert convert("--to", "hf", first, tmp_path / "mean", "--average", *others) == 0
    means = {
        name: np.mean([array, *(arrays(other)[name] for other in others)], axis=0)
        for name, array in arrays(first).items()
    }
    rounded = {
        name: torch.from_numpy(mean).float().bfloat16().double().numpy()
        for name, mean in means.items()
    }
    for name, array in arrays(tmp_path / "mean").items():
        # float32 and float64 sums may fall on two sides of the middle of two bfloat16 values
        assert (array != rounded[name]).mean() < 1e-3
    args = ["--to", "hf", first, tmp_path / "wide", "--export_dtype", "float32"]
    assert convert(*args, "--average", *others) == 0
    assert_close(tmp_path / "wide", means)
    assert logits_of(tmp_path / "wide").isfinite().all()


def test_weighted_mean(tmp_path):
    first, second = save_models(tmp_path, 2)
    args = ["--merge", "linear", "--models", second, "--merge_weights", 3, 1]
    assert convert("--to", "hf", first, tmp_path / "out", *args) == 0
    a, b = arrays(first), arrays(second)
    assert_close(tmp_path / "out", {name: 0.75 * a[name] + 0.25 * b[name] for name in a})


def _slerp(a, b, t):
    cosine = (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)
    angle = np.arccos(cosine)
    return (np.sin((1 - t) * angle) * a + np.sin(t * angle) * b) / np.sin(angle)


def test_slerp_equals_float64(tmp_path):
    first, second = save_models(tmp_path, 2)
    args = ["--merge", "slerp", "--models", second, "--position", 0.3]
    assert convert("--to", "hf", first, tmp_path / "out", *args) == 0
    a, b = arrays(first), arrays(second)
    expected = {
        name: _slerp(a[name], b[name], 0.3)
        # norms are almost parallel: linear
        if a[name].ndim > 1
        or (a[name] @ b[name]) ** 2 < 0.999 * (a[name] @ a[name]) * (b[name] @ b[name])
        else 0.7 * a[name] + 0.3 * b[name]
        for name in a
    }
    assert_close(tmp_path / "out", expected)
    # equal models stay as they are, where the formula divides 0 by 0
    assert (
        convert("--to", "hf", first, tmp_path / "same", "--merge", "slerp", "--models", first) == 0
    )
    assert_close(tmp_path / "same", a)


def _ties(base, models, weights, density):
    deltas = []
    for model in models:
        delta = model - base
        n_kept = max(1, int(density * delta.size))
        threshold = np.sort(np.abs(delta), axis=None)[-n_kept]
        deltas.append(np.where(np.abs(delta) >= threshold, delta, 0.0))
    elected = np.sign(sum(w * delta for w, delta in zip(weights, deltas, strict=True)))
    total, count = np.zeros_like(base), np.zeros_like(base)
    for weight, delta in zip(weights, deltas, strict=True):
        agrees = (np.sign(delta) == elected) & (delta != 0)
        total += np.where(agrees, weight * delta, 0)
        count += np.where(agrees, weight, 0)
    return base + total / np.where(count == 0, 1, count)


def test_ties_equals_float64(tmp_path):
    origin, first, *others = save_models(tmp_path, 4, near=0.1)
    args = ["--merge", "ties", "--models", *others, "--origin", origin, "--density", 0.3]
    args += ["--merge_weights", 1, 2, 0.5]
    assert convert("--to", "hf", first, tmp_path / "out", *args) == 0
    base, models = arrays(origin), [arrays(folder) for folder in (first, *others)]
    expected = {
        name: _ties(base[name], [model[name] for model in models], [1, 2, 0.5], 0.3)
        for name in base
    }
    assert_close(tmp_path / "out", expected)
    plain = {name: np.mean([model[name] for model in models], axis=0) for name in base}
    assert any(np.abs(plain[name] - expected[name]).max() > 0.01 for name in base)


def test_checkpoints_of_a_run_are_averaged(tmp_path):
    """Steps of a run give a checkpoint that a run starts from, and a Hugging Face folder."""
    run(tiny_config(tmp_path / "run", checkpoint__enable=True, checkpoint__interval=2))
    steps = [tmp_path / "run" / "checkpoint" / f"step-{step}" for step in (2, 4)]
    assert convert("--to", "hf", steps[1], tmp_path / "hf", "--average", steps[0]) == 0
    for step in (0, 1):
        assert convert("--to", "hf", steps[step], tmp_path / f"{step}") == 0
    a, b = arrays(tmp_path / "0"), arrays(tmp_path / "1")
    assert_close(tmp_path / "hf", {name: (a[name] + b[name]) / 2 for name in a})
    assert convert("--to", "dcp", steps[1], tmp_path / "step-4", "--average", steps[0]) == 0
    start = tiny_config(tmp_path / "new", checkpoint__initial_load_path=tmp_path / "step-4")
    assert run(start).step == 4


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--merge", "linear"], "--merge linear needs --models"),
        (["--models", "{1}"], "--models has no effect without --merge"),
        (["--average", "{1}", "--merge_weights", 1], "has 1 weights for 2 models"),
        (["--average", "{1}", "--merge_weights", 0, 0], "not all 0"),
        (["--average", "{1}", "--merge", "ties"], "--average cannot be combined"),
        (["--average", "{1}", "--density", 0.5], "--density has no effect without --merge ties"),
        (["--merge", "slerp", "--models", "{1}", "{0}"], "merges two models, not 3"),
        (["--merge", "slerp", "--models", "{1}", "--position", 2], "--position is 2.0"),
        (["--merge", "ties", "--models", "{1}"], "needs --origin"),
        (["--average", "{other}"], "dim 64 instead of 32"),
        (["--average", "/absent"], "/absent"),
    ],
)
def test_mistakes_are_reported(tmp_path, capsys, args, message):
    folders = save_models(tmp_path, 2)
    (tmp_path / "wider").mkdir()
    names = {"other": save_models(tmp_path / "wider", 1, dim=64)[0]}
    words = [str(word).format(*folders, **names) for word in args]
    assert convert("--to", "hf", folders[0], tmp_path / "out", *words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_classes_of_transformers_may_differ_in_ids_of_tokens(tmp_path):
    config = transformers.GPT2Config(
        vocab_size=96, n_embd=32, n_layer=1, n_head=2, eos_token_id=1, use_cache=True
    )
    chat = transformers.GPT2Config(**{**config.to_dict(), "eos_token_id": 2, "use_cache": False})
    for name, one in (("base", config), ("chat", chat)):
        torch.manual_seed(0)
        transformers.GPT2LMHeadModel(one).save_pretrained(tmp_path / name)
    base, out = tmp_path / "base", tmp_path / "out"
    assert convert("--to", "hf", base, out, "--average", tmp_path / "chat") == 0
    assert_close(out, arrays(base))


class Counted(TensorSource):
    """A source that knows how many of all sources' tensors are alive."""

    def __init__(self, tensors, alive):
        self.specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
        self._tensors, self._alive = tensors, alive

    def read(self, name, slices=None):
        self._alive.append(name)
        return self._tensors[name].clone()


def test_each_tensor_is_read_alone(tmp_path):
    """A merge reads one tensor of each model, for linear means once, and TIES twice."""
    tensors = [{"a": torch.randn(4, 3), "n": torch.tensor([1])} for _ in range(3)]
    reads = []
    sources = {str(i): Counted(each, reads) for i, each in enumerate(tensors)}
    merged = MergedSource(sources, linear([1.0, 1.0, 1.0]))
    assert torch.equal(merged.read("n"), torch.tensor([1]))
    reads.clear()
    rows = (slice(1, 3), slice(0, 3))
    mean = torch.stack([each["a"].double() for each in tensors]).mean(dim=0)
    assert torch.allclose(merged.read("a", rows).double(), mean[1:3], atol=1e-6)
    assert reads == ["a"] * 3
    merged.read("a", rows)
    assert reads == ["a"] * 3  # the merged tensor serves all of its slices
    base = Counted(tensors[0], reads)
    reads.clear()
    MergedSource(sources, ties([1.0, 1.0, 1.0], 0.5), base=base).read("a")
    assert reads == ["a"] * 7


def test_other_values_are_not_averaged():
    sources = {str(i): Counted({"n": torch.tensor([i])}, []) for i in range(2)}
    with pytest.raises(UserError, match=r"n \(torch\.int64\) differs between the models"):
        MergedSource(sources, linear([1.0, 1.0])).read("n")
    absent = {"0": sources["0"], "1": Counted({}, [])}
    with pytest.raises(UserError, match=r"n has the shape \[1\] in 0, and absent in 1"):
        MergedSource(absent, linear([1.0, 1.0]))


@pytest.mark.parametrize("merge", [linear([1.0, 1.0]), slerp(0.5), ties([1.0, 1.0], 0.5)])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_are_refused(merge, wrong):
    """A model that has diverged is named; the other is not."""
    good, bad = torch.ones(4), torch.tensor([1.0, wrong, 2.0, 3.0])
    sources = {"fine": Counted({"a": good}, []), "diverged": Counted({"a": bad}, [])}
    base = Counted({"a": torch.zeros(4)}, [])
    with pytest.raises(UserError, match="a has values that are NaN or infinite in diverged$"):
        MergedSource(sources, merge, base=base).read("a")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options", "theirs"),
    [
        ("linear", ["--merge_weights", "0.5", "2"], {"weights": [0.5, 2.0], "normalize": True}),
        ("slerp", ["--position", "0.3"], {"t": 0.3}),
        (
            "ties",
            ["--density", "0.4", "--merge_weights", "1", "2"],
            {"weights": [1.0, 2.0], "density": 0.4, "normalize": True, "int8_mask": False},
        ),
    ],
)
def test_mergekit_writes_the_same_models(tmp_path, method, options, theirs):
    pytest.importorskip("mergekit", reason="needs the extra mergekit")
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    near = 0.01 if method == "ties" else None
    base, first, second = save_models(tmp_path, 3, near=near)
    origin = ["--origin", str(base)] if method == "ties" else []
    words = [str(first), str(tmp_path / "ours"), "--merge", method, "--models", str(second)]
    assert convert("--to", "hf", *words, *origin, *options) == 0
    weights = theirs.pop("weights", None)
    models = [{"model": str(folder)} for folder in (first, second)]
    for number, model in enumerate(models):
        if weights:
            model["parameters"] = {"weight": weights[number]}
        if "density" in theirs:
            model["parameters"]["density"] = theirs["density"]
    document = {
        "merge_method": method,
        "models": models,
        "parameters": {name: value for name, value in theirs.items() if name != "density"},
        "dtype": "float32",
        "base_model": str(base if method == "ties" else first),
    }
    run_merge(
        MergeConfiguration.model_validate(document),
        str(tmp_path / "theirs"),
        MergeOptions(copy_tokenizer=False, lazy_unpickle=False, quiet=True),
    )
    # Float32 sums and angles, in another order.
    assert_close(tmp_path / "ours", arrays(tmp_path / "theirs"), rtol=1e-5)
