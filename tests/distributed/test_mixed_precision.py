"""Mixed precision in a single process, compared with a model in the lower precision and with
FSDP."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.equivalence.workers import Workers
from tests.training import llama_config, read_metrics, train
from torchtitan.components.losses.loss import CrossEntropyLoss
from torchtitan.distributed import initialize_weights
from torchtitan.distributed.mixed_precision import MixedPrecision

CONFIG = llama_config(tie_embeddings=True)


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = CONFIG.build()
    initialize_weights(model, 0)
    return model.to(dtype)


def backward(model: nn.Module, seed: int) -> None:
    tokens = torch.randint(
        0, CONFIG.vocab_size, (2, 16), generator=torch.Generator().manual_seed(seed)
    )
    model(tokens, head=CrossEntropyLoss.Config().build(), labels_BL=tokens).backward()


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def test_gradients_equal_a_model_in_the_lower_precision():
    """Bitwise for each micro-batch; their sum is in float32."""
    model, precision = make_model(), MixedPrecision(torch.bfloat16)
    hidden = []
    model.layers["0"].register_forward_hook(
        lambda module, inputs, output: hidden.append(output.dtype)
    )
    expected: list[Tensor] = []
    for seed in range(3):
        with precision.of(model):
            backward(model, seed)
        low = make_model(torch.bfloat16)
        backward(low, seed)
        expected = [
            g.float() + (expected[i] if expected else 0) for i, g in enumerate(gradients(low))
        ]
        assert all(map(torch.equal, gradients(model), expected))
    assert {g.dtype for g in gradients(model)} == {torch.float32}
    assert hidden == [torch.bfloat16] * 3


def test_a_context_has_current_weights():
    """Fused optimizers do not change a tensor's version, so a version could not tell whether to
    copy."""
    model, precision = make_model(), MixedPrecision(torch.bfloat16)
    layer = model.layers["0"].attention.wq
    weight = layer.weight
    with torch.inference_mode(), precision.of(model):
        memory = layer.weight.data_ptr()
    with precision.of(model):
        backward(model, 0)
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()
    with precision.of(model):
        assert torch.equal(layer.weight, weight.bfloat16())
        assert layer.weight.data_ptr() == memory
        inside = layer.weight
        with precision.of(model):
            assert layer.weight is inside
        assert layer.weight is inside
    weight.requires_grad_(False)
    with precision.of(model):
        assert not layer.weight.requires_grad


def test_fixed_weights_are_copied_once():
    model, precision = make_model(), MixedPrecision(torch.bfloat16)
    layer = model.layers["0"].attention.wq

    def copied() -> Tensor:
        with precision.of(model):
            return layer.weight

    with precision.fixed_weights():
        assert copied() is copied()
    assert copied() is not copied()


def test_a_tied_weight_has_one_copy():
    model = make_model()
    with MixedPrecision(torch.bfloat16).of(model):
        copies = {id(weight) for module in model.modules() for weight in module.parameters()}
    assert len(copies) == len(list(model.parameters()))


def test_weights_are_restored_after_an_error():
    model = make_model()
    before = list(model.named_parameters())
    with pytest.raises(ZeroDivisionError), MixedPrecision(torch.bfloat16).of(model):
        raise ZeroDivisionError
    assert [(name, id(weight)) for name, weight in model.named_parameters()] == [
        (n, id(w)) for n, w in before
    ]
    assert all(isinstance(weight, nn.Parameter) for _, weight in model.named_parameters())


def train_in_bfloat16(folder: Path) -> None:
    train(folder, training__mixed_precision_param="bfloat16", training__global_batch_size=4)


def test_one_process_equals_two(workers: Workers, tmp_path: Path):
    """Both compute micro-batches of the same shape and add their gradients in float32; 1e-6 is for
    the order."""
    workers.run(train_in_bfloat16, tmp_path / "two")
    train_in_bfloat16(tmp_path / "one")
    one, two = (read_metrics(tmp_path / name, "loss", "grad_norm") for name in ("one", "two"))
    assert two == [pytest.approx(line, rel=1e-6) for line in one]
