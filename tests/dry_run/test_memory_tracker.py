"""Trackers of memory, communication and operations against manual sums, on real and fake
tensors."""

import contextlib
import gc

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils.checkpoint import checkpoint

from torchtitan.dry_run.memory_tracker import MemoryTracker
from torchtitan.dry_run.observer import observing
from torchtitan.dry_run.work_tracker import Transfer, WorkTracker

KIB = 2**10


@pytest.fixture(params=["real", "fake"])
def tensors(request):
    """Run the test with real tensors and with fake ones."""
    with FakeTensorMode() if request.param == "fake" else contextlib.nullcontext():
        yield


def kib(n, **options):
    """Return a tensor of n KiB."""
    return torch.zeros(n, 256, **options)


def transfers_of(work):
    return {one: calls for one, calls in work.work.items() if isinstance(one, Transfer)}


class TestMemory:
    def test_views_and_in_place_results_add_no_memory(self, tensors):
        tracker = MemoryTracker()
        with observing(tracker):
            a = kib(4)
            views = [a[1:], a.view(-1), a.t(), a.detach(), a.add_(1), torch.add(a, 1, out=a)]
            assert tracker.use().total() == 4 * KIB
            b = a + 1
            assert tracker.use().total() == 8 * KIB
            del a
            assert tracker.use().total() == 8 * KIB
            views.clear()
            assert tracker.use().total() == 4 * KIB
            del b
        assert tracker.use().total() == 0
        assert tracker.peak().total() == 8 * KIB

    def test_only_new_and_labeled_tensors_count(self, tensors):
        tracker = MemoryTracker()
        existing, weight = kib(4), kib(8)
        tracker.label("parameters", [weight])
        with observing(tracker):
            kept = [existing[1:], weight[1:], existing * weight[:4]]
        assert tracker.use()["parameters"] == 8 * KIB
        assert tracker.use().total() == 12 * KIB
        assert kept
        del weight
        assert tracker.use().total() == 12 * KIB  # a view keeps it

    def test_a_resized_storage_is_freed_and_allocated(self, tensors):
        """FSDP resizes the storage of gathered weights without the dispatcher."""
        tracker = MemoryTracker()
        with observing(tracker):
            a = kib(4)
            a.untyped_storage().resize_(0)
            assert tracker.use().total() == 0
            b = kib(2)
            a.untyped_storage().resize_(4 * KIB)
        tracker.label("gathered parameters", [a])  # also relabels the past
        assert tracker.peak()["gathered parameters"] == 4 * KIB
        assert tracker.peak().total() == 6 * KIB
        assert b is not None

    def test_kinds_of_a_training_step(self, tensors):
        """Two layers with a ReLU in between: 1 KiB of input, 256 KiB of weights per layer, 1 KiB of
        hidden states."""
        tracker = MemoryTracker()
        x, weights = kib(1), [kib(256, requires_grad=True) for _ in range(2)]
        tracker.label("parameters", weights)
        with observing(tracker):
            hidden = F.linear(x, weights[0])
            used = F.relu(hidden)
            del hidden
            before_backward = tracker.use()
            F.linear(used, weights[1]).sum().backward()
            del used
            tracker.label("gradients", [weight.grad for weight in weights])
        assert before_backward["parameters"] == 512 * KIB
        # Only the result of ReLU is saved, for its backward pass and as the input of the second
        # layer.
        assert before_backward.total() == 513 * KIB
        end = tracker.use()
        assert end["parameters"] == end["gradients"] == 512 * KIB
        assert end.total() == 1024 * KIB
        # The loss and its gradient add 4 bytes each.
        assert tracker.peak()["activations"] == 1 * KIB + 8

    def test_checkpointing_saves_only_the_input(self, tensors):
        weights = [kib(256, requires_grad=True) for _ in range(3)]

        def layers(x):
            for weight in weights:
                x = F.relu(F.linear(x, weight))
            return x

        saved = {}
        for name, run in {
            "none": layers,
            "full": lambda x: checkpoint(layers, x, use_reentrant=False),
        }.items():
            tracker = MemoryTracker()
            with observing(tracker):
                output = run(kib(16))
                saved[name] = tracker.use().total()
                output.sum().backward()
            for weight in weights:
                weight.grad = None
        assert saved["none"] == 4 * 16 * KIB  # the input and three results
        # the input and the last result; PyTorch adds an empty tensor
        assert saved["full"] <= 2 * 16 * KIB + 8

    def test_replayed_memory_is_counted_separately(self, tensors):
        tracker = MemoryTracker()
        with observing(tracker):
            start = tracker.now
            a = kib(4)
            temporary = kib(8)
            del temporary
            middle = tracker.now
            del a
            end = tracker.now
            twins = {}
            tracker.replay(start, middle, twins, omit=[])
            assert tracker.use().total() == 4 * KIB
            b = kib(2)
            tracker.replay(middle, end, twins, omit=[])
            assert twins == {}
        assert tracker.use().total() == 2 * KIB
        assert tracker.peak().total() == 12 * KIB
        assert b is not None


class TestSharded:
    """DTensors on a fake group of 8 ranks: only the local shard counts."""

    @pytest.fixture(autouse=True)
    def mesh(self):
        dist.init_process_group("fake", rank=0, world_size=8)
        yield init_device_mesh("cpu", (8,))
        dist.destroy_process_group()
        _clear_sharding_prop_cache()

    def test_only_local_shards_are_counted(self, tensors, mesh):
        tracker, work = MemoryTracker(), WorkTracker()
        with observing(tracker, work):
            a = DTensor.from_local(kib(8), mesh, [Shard(0)])
            b = DTensor.from_local(kib(256), mesh, [Shard(1)], shape=(256, 2048), stride=(2048, 1))
            weight = distribute_tensor(torch.zeros(256, 256), mesh)
            product = a @ weight
        local = (8 + 256 + 256) * KIB + 8 * KIB
        assert tracker.use().total() == local
        assert tracker.peak().total() < 2 * local
        assert work.flops == 2 * 8 * 256 * 256  # 8 of 64 rows
        assert product.shape == (64, 256) and b.shape == (256, 2048)

    def test_messages(self, tensors):
        work, world = WorkTracker(), tuple(range(8))
        with observing(work):
            dist.all_gather_single(kib(8), kib(1))
            dist.reduce_scatter_single(kib(1), kib(16)[:8])
            dist.all_reduce(kib(1))
            dist.all_reduce(kib(1))
            dist.send(kib(2), 1)
        transfers = {
            Transfer("all-gather", world, 8 * KIB): 7 * KIB,
            Transfer("reduce-scatter", world, 8 * KIB): 7 * KIB,
            Transfer("all-reduce", world, KIB): 1.75 * KIB,
            Transfer("send", world, 2 * KIB): 2 * KIB,
        }
        assert transfers_of(work) == {
            one: 2 if one.kind == "all-reduce" else 1 for one in transfers
        }
        assert {one: one.n_bytes_sent for one in transfers_of(work)} == transfers

    def test_functional_messages_and_their_backward(self, tensors):
        import torch.distributed._functional_collectives as funcol

        work, world = WorkTracker(), tuple(range(8))
        with observing(work):
            x = kib(1, requires_grad=True)
            funcol.all_gather_single_autograd(x, 0, dist.group.WORLD).sum().backward()
            funcol.wait_tensor(funcol.all_reduce(kib(1), "sum", dist.group.WORLD))
        assert transfers_of(work) == {
            Transfer("all-gather", world, 8 * KIB): 1,
            Transfer("reduce-scatter", world, 8 * KIB): 1,
            Transfer("all-reduce", world, KIB): 1,
        }


class TestOperations:
    def test_products_forward_and_backward(self, tensors):
        work = WorkTracker()
        x, weight = torch.zeros(6, 4, requires_grad=True), torch.zeros(5, 4, requires_grad=True)
        with observing(work):
            F.linear(x, weight).sum().backward()
        assert work.flops == 3 * 2 * 6 * 4 * 5

    def test_in_place_and_out_products(self, tensors):
        work = WorkTracker()
        a, b, c = torch.zeros(2, 3), torch.zeros(3, 4), torch.zeros(2, 4)
        with observing(work):
            c.addmm_(a, b)
            torch.mm(a, b, out=c)
        assert work.flops == 2 * 2 * 2 * 3 * 4

    def test_attention(self, tensors):
        """Forward has two products of 2 B H L² D operations, and backward has four. Grouped-query
        attention."""
        work = WorkTracker()
        q, k, v = (torch.zeros(2, heads, 16, 8, requires_grad=True) for heads in (4, 2, 2))
        with observing(work):
            F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            ).sum().backward()
        assert work.flops == 3 * 2 * (2 * 2 * 4 * 16 * 16 * 8)


def test_the_tracker_keeps_no_tensor_alive():
    tracker = MemoryTracker()
    with observing(tracker):
        a = kib(4)
    del a
    gc.collect()
    assert tracker.use().total() == 0
