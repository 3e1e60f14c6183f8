"""`ReplacedKernels` after an error; `test_cpu_products` and `test_cpu_sums` test what uses it."""

import pytest
import torch

from torchtitan.tools.replaced_kernels import ReplacedKernels


def test_a_block_after_one_that_could_not_begin() -> None:
    choices = [{}, {"tanh": torch.ones_like}]

    def choose():
        if chosen := choices.pop(0):
            return chosen
        raise ZeroDivisionError

    kernels, x = ReplacedKernels(choose), torch.zeros(2)
    with pytest.raises(ZeroDivisionError), kernels.block():
        pass
    with kernels.block():
        assert x.tanh().tolist() == [1, 1]
    assert x.tanh().tolist() == [0, 0]
