"""Remembered results of operations are those of PyTorch's mode for fake tensors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from torchtitan.dry_run.known_results import KnownResults
from torchtitan.dry_run.observer import observing

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def fake_mode():
    with FakeTensorMode() as mode:
        yield mode


class Counted(KnownResults):
    """Counts the operations that run."""

    n_run = 0

    def call(self, func, args, kwargs):
        def counted(*args, **kwargs):
            self.n_run += 1
            return func(*args, **kwargs)

        counted.namespace, counted._schema = func.namespace, func._schema
        return super().call(self.functions.setdefault(func, counted), args, kwargs)

    def __init__(self):
        super().__init__()
        self.functions = {}


def facts(result, arguments):
    """Return the size and type of a result, and the argument that it is, or has the memory of."""
    if isinstance(result, (list, tuple)):
        return type(result), [facts(one, arguments) for one in result]
    if result is None:
        return None
    storage = result.untyped_storage()
    owners = [
        i for i, one in enumerate(arguments) if one.untyped_storage()._cdata == storage._cdata
    ]
    same = [i for i, one in enumerate(arguments) if one is result]
    kind = (type(result), result.shape, result.dtype, result.device, result.fake_mode)
    return (*kind, result.stride(), result.storage_offset(), storage.nbytes(), owners, same)


def tensors():
    return torch.randn(4, 6), torch.randn(4, 6), torch.ones(6, 4, dtype=torch.bfloat16)


CALLS = {
    "new": lambda a, b, c: (aten.add.Tensor, (a, b), {"alpha": 2}),
    "type": lambda a, b, c: (aten._to_copy.default, (a,), {"dtype": torch.bfloat16}),
    "scalar": lambda a, b, c: (aten.mul.Tensor, (c, 2.5), {}),
    "device": lambda a, b, c: (aten.zeros.default, ([3, 2],), {"device": torch.device("cuda:0")}),
    "in place": lambda a, b, c: (aten.add_.Tensor, (a, b), {}),
    "output": lambda a, b, c: (aten.mm.out, (b, c.float()), {"out": torch.empty(4, 4)}),
    "view": lambda a, b, c: (aten.view.default, (a, [2, 12]), {}),
    "transposed": lambda a, b, c: (aten.t.default, (c,), {}),
    "part": lambda a, b, c: (aten.slice.Tensor, (a, 1, 2, 5), {}),
    "unsafe view": lambda a, b, c: (aten._unsafe_view.default, (a, [24]), {}),
    "several views": lambda a, b, c: (aten.split.Tensor, (a, 3, 1), {}),
    "several results": lambda a, b, c: (
        aten.native_layer_norm.default,
        (a, [6], None, None, 1e-5),
        {},
    ),
    "list of tensors": lambda a, b, c: (aten.cat.default, ([a, b], 1), {}),
    "indices": lambda a, b, c: (aten.index.Tensor, (a, [None, torch.tensor([0, 2])]), {}),
    "complex": lambda a, b, c: (aten.view_as_complex.default, (a.view(4, 3, 2),), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_the_mode(name):
    results, found, expected = Counted(), [], []
    for _ in range(3):
        a, b, c = tensors()
        func, args, kwargs = CALLS[name](a, b, c)
        arguments = [a, b, c, *args[:1], *kwargs.values()]
        arguments = [one for one in arguments if isinstance(one, FakeTensor)]
        found.append(facts(results.call(func, args, kwargs), arguments))
        expected.append(facts(func(*args, **kwargs), arguments))
    assert found == expected
    assert results.n_run == 1


def test_results_have_memory_of_their_own():
    results, (a, b, _) = KnownResults(), tensors()
    sums = [results.call(aten.add.Tensor, (a, b), {}) for _ in range(3)]
    assert len({one.untyped_storage()._cdata for one in sums}) == 3


@pytest.mark.parametrize("shared_first", [True, False])
def test_arguments_that_share_memory_do_not_matter_to_others(shared_first):
    results = KnownResults()
    for is_shared in (shared_first, not shared_first):
        a, b, other = torch.randn(3), torch.randn(3), torch.randn(3)
        out = a if is_shared else other
        assert results.call(aten.add.out, (a, b), {"out": out}) is out


def test_operations_on_sizes_and_values_run():
    results = Counted()
    for _ in range(2):
        a, _, _ = tensors()
        results.call(aten.resize_.default, (a, [2, 2]), {})
        assert a.shape == (2, 2)
    known = torch.tensor(3)  # whose value the mode keeps
    for _ in range(2):
        assert results.call(aten._local_scalar_dense.default, (known,), {}) == 3
    conjugate = torch.randn(3, dtype=torch.complex64).conj()
    for _ in range(2):
        assert not results.call(aten.resolve_conj.default, (conjugate,), {}).is_conj()
    assert results.n_run == 6


def test_a_difference_of_an_argument_is_noticed():
    results, (a, b, _) = KnownResults(), tensors()
    for other in (b, b.double(), torch.randn(1, 6), torch.randn(6, 4).t()):
        assert facts(results.call(aten.add.Tensor, (a, other), {}), []) == facts(a + other, [])
    halves = (aten.split.Tensor, (a, 3, 1), {}), (aten.split.Tensor, (a, 3, 0), {})
    assert [len(results.call(*call)) for call in halves] == [2, 2]
    one, true = (
        results.call(aten.mul.Tensor, (torch.ones(2, dtype=bool), x), {}) for x in (1, True)
    )
    assert (one.dtype, true.dtype) == (torch.int64, torch.bool)


def test_only_views_depend_on_the_place_of_their_argument():
    results = Counted()
    for start in (0, 2):
        block = torch.randn(4, 6)[start : start + 2]
        results.call(aten.mul.Tensor, (block, 2.0), {})
        assert results.call(aten.slice.Tensor, (block, 0, 1, 2), {}).storage_offset() == (
            6 * (start + 1)
        )
    assert results.n_run == 3


def test_other_runs_know_the_results(fake_mode):
    """In tensors of their own mode."""
    a, _, _ = tensors()
    KnownResults().call(aten.sinh.default, (a,), {})
    n_known = len(KnownResults._known)
    with FakeTensorMode() as other:
        made = KnownResults().call(aten.sinh.default, (torch.randn(4, 6),), {})
    assert len(KnownResults._known) == n_known
    assert made.fake_mode is other


def test_other_modes_and_real_tensors(fake_mode):
    results, (a, b, _) = KnownResults(), tensors()
    results.call(aten.add.Tensor, (a, b), {})
    with FakeTensorMode() as other:
        assert (
            results.call(aten.add.Tensor, (torch.randn(4, 6), torch.randn(4, 6)), {}).fake_mode
            is other
        )
        made = [results.call(aten.zeros.default, ([2],), {}) for _ in range(2)]
    assert {one.fake_mode for one in made} == {other}
    assert results.call(aten.zeros.default, ([2],), {}).fake_mode is fake_mode


def test_a_backward_pass_notices_changed_views():
    """Views count changes of their memory together, also those that are made from memory."""
    with observing():
        for _ in range(2):
            weight = torch.randn(4, 6, requires_grad=True)
            x = weight * 2
            part = x[:, 1:3].t()
            loss = (x * x).sum()
            loss.backward(retain_graph=True)
            assert weight.grad.shape == weight.shape and part.grad_fn is not None
            version = x._version
            part.add_(1)
            assert x._version == version + 1
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
