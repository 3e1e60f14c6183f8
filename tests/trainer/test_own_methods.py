"""What `Trainer` knows about the methods that a subclass overrides."""

from typing import Any

import pytest

from torchtitan.experiments.gradient_aggregation.trainer import MicroBatchClippingTrainer
from torchtitan.experiments.preference.trainer import PreferenceTrainer
from torchtitan.trainer import Trainer

ATTRIBUTES = [
    "has_own_loss",
    "has_own_forward",
    "has_own_backward",
    "has_own_update",
    "has_own_pipeline",
]


def true_of(trainer: type) -> set[str]:
    return {name for name in ATTRIBUTES if getattr(trainer, name)}


def nothing(self: Any, *arguments: Any) -> None: ...


@pytest.mark.parametrize(
    ("method", "attributes"),
    [
        ("compute_loss", {"has_own_loss", "has_own_forward"}),
        ("forward", {"has_own_forward"}),
        ("forward_backward_step", {"has_own_backward"}),
        ("update", {"has_own_update"}),
        ("read_result", {"has_own_update"}),
        ("build_pipeline", {"has_own_pipeline"}),
        ("complete_step", set()),
    ],
)
def test_a_class_that_overrides_a_method_has_the_attribute(method, attributes):
    own = type("Own", (Trainer,), {method: nothing})
    mixed = type("Mixed", (type("Mixin", (), {method: nothing}), Trainer), {})
    for trainer in (own, type("Child", (own,), {}), mixed):
        assert true_of(trainer) == attributes
    assert true_of(Trainer) == set()


def test_of_the_library():
    assert true_of(PreferenceTrainer) == {"has_own_loss", "has_own_forward"}
    assert true_of(MicroBatchClippingTrainer) == {"has_own_backward"}


def test_a_declaration_must_be_true():
    class Loss(Trainer):
        has_own_loss = True
        compute_loss = nothing  # type: ignore[assignment]

    assert Loss.has_own_loss
    with pytest.raises(
        TypeError, match=r"Misspelled\.has_own_loss is True, but the class defines no compute_loss"
    ):
        type("Misspelled", (Trainer,), {"has_own_loss": True, "computeloss": nothing})
    with pytest.raises(
        TypeError, match="has_own_forward is False, but the class defines its own .* or forward"
    ):
        type("Denied", (Trainer,), {"has_own_forward": False, "forward": nothing})
