"""All private names of PyTorch (2.13) that this project uses, with the reason for each, imported on
first use. The only exceptions are private methods that a subclass overrides."""

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

from torchtitan.tools.errors import UserError
from torchtitan.tools.sharded import is_dtensor

if TYPE_CHECKING:
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch._ops import HigherOrderOperator, OpOverloadPacket
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam as FSDPParam
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    _Schedule = PipelineScheduleSingle | PipelineScheduleMulti
    _KeywordArguments = list[dict[str, object]]

_SOURCES = {
    # PyTorch documents these only in private modules.
    "FakeTensor": "torch._subclasses.fake_tensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor",
    "DynamicOutputShapeException": "torch._subclasses.fake_tensor",
    "DataDependentOutputException": "torch._subclasses.fake_tensor",
    "OpOverload": "torch._ops",
    "TorchDispatchMode": "torch.utils._python_dispatch",
    "is_traceable_wrapper_subclass_type": "torch.utils._python_dispatch",
    "record_memory_history": "torch.cuda.memory:_record_memory_history",
    "dump_memory_snapshot": "torch.cuda.memory:_dump_snapshot",
    # The functions that a `torch.device` context changes.
    "device_constructors": "torch.utils._device:_device_constructors",
    # The memory of a tensor, also of those inside a wrapper.
    "get_untyped_storages": "torch.distributed._tools.common_utils",
    # Functions of `torch.nn.functional` that take `out`, which the public ones do not.
    "nn_functions": "torch._C._nn:",
    # Nested containers of tensors, as passed to PyTorch's operations; `optree` adds a dependency
    # and has fewer types.
    "tree_iter": "torch.utils._pytree",
    "tree_map": "torch.utils._pytree",
    "tree_map_only": "torch.utils._pytree",
    # Differentiable collectives; `torch.distributed` has none.
    "all_gather_single_autograd": "torch.distributed._functional_collectives",
    "all_to_all_single_autograd": "torch.distributed._functional_collectives",
    "reduce_scatter_single_autograd": "torch.distributed._functional_collectives",
    "wait_tensor": "torch.distributed._functional_collectives",
    "AsyncCollectiveTensor": "torch.distributed._functional_collectives",
    # `torch.utils.checkpoint.checkpoint` wraps a call; this wraps a module without changing names
    # in its state dict.
    "checkpoint_wrapper": "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "CheckpointWrapper": "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    # DDP built on FSDP2; `DistributedDataParallel` supports neither DTensor parameters nor mixed
    # precision.
    "replicate": "torch.distributed._composable.replicate_with_fsdp",
    # A mesh for some parameters of a unit: `fully_shard` takes it, but PyTorch 2.13 documents the
    # types nowhere else.
    "ShardPlacementResult": "torch.distributed.fsdp._fully_shard._fsdp_common",
    "fsdp_mesh_info": "torch.distributed.fsdp._fully_shard._fsdp_init:_get_mesh_info",
    # FSDP's record of a parameter.
    "FSDPParam": "torch.distributed.fsdp._fully_shard._fsdp_param",
    # `DeviceMesh` has no public way to register flattened dimensions as one, to split one, or to
    # join parts of a mesh.
    "flatten_mesh": "torch.distributed.device_mesh:DeviceMesh._flatten",
    "split_mesh": "torch.distributed.device_mesh:DeviceMesh._unflatten",
    "concatenate_meshes": "torch.distributed.device_mesh:DeviceMesh._concatenate",
    # Public DTensor methods return the shard, but not its offset in the whole tensor.
    "compute_local_shape_and_global_offset": "torch.distributed.tensor._utils",
    # DTensor infers a result's shape by running operations on whole shapes, which a dry run must
    # not count. It caches the results, and has no public way to clear the cache.
    "DecompShardingStrategy": "torch.distributed.tensor._decompositions",
    "ShardingPropagator": "torch.distributed.tensor._sharding_prop",
    "clear_sharding_cache": "torch.distributed.tensor.debug:_clear_sharding_prop_cache",
    # `torch.distributed` has no public access to the default store or to groups by name, and cannot
    # change timeouts.
    "default_store": "torch.distributed.distributed_c10d:_get_default_store",
    "group_by_name": "torch.distributed.distributed_c10d:_resolve_process_group",
    "set_group_timeout": "torch.distributed.distributed_c10d:_set_pg_timeout",
    # DCP's public readers and writers support only local folders.
    "FsspecReader": "torch.distributed.checkpoint._fsspec_filesystem",
    "FsspecWriter": "torch.distributed.checkpoint._fsspec_filesystem",
    # Contents of DCP's files, which its public planners return as opaque objects.
    "StorageInfo": "torch.distributed.checkpoint.filesystem:_StorageInfo",
    "set_element": "torch.distributed.checkpoint._nested_dict",
    "PyTorchFileReader": "torch._C",
    # Global compiler settings; `torch.compile(options=…)` takes only inductor's.
    "functorch_config": "torch._functorch.config:",
    "inductor_config": "torch._inductor.config:",
    # The compiler's limit is for a function with changing inputs; torchao's optimizers compile one
    # function for each shape, and lift the limit in the same way.
    "disable_cache_limit": "torch._dynamo.utils",
    # Test whether inductor can compile on this machine; `torch.compile` would fail later.
    "get_cpp_compiler": "torch._inductor.cpp_builder",
    "InvalidCxxCompiler": "torch._inductor.exc",
    # Pins existing memory; `Tensor.pin_memory` copies.
    "pin_memory": "torch.cuda._pin_memory_utils",
    "unpin_memory": "torch.cuda._pin_memory_utils",
    # The mathematics of `torch.optim.Muon`, which cannot divide it among ranks.
    "orthogonalize": "torch.optim._muon:_zeropower_via_newtonschulz",
    "adjusted_lr": "torch.optim._muon:_adjust_lr",
    # A tensor of other tensors; only this function gives it a shape and a type.
    "make_wrapper_subclass": "torch:Tensor._make_wrapper_subclass",
    # The number of the backward pass in progress, or -1; hooks need a tensor that takes part in it.
    "current_backward_pass": "torch._C:_current_graph_task_id",
}
"""Name in this module → PyTorch module, and the name there if different (`module:` is the module
itself)."""


def __getattr__(name: str) -> Any:
    if name not in _SOURCES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    module, _, torch_name = _SOURCES[name].partition(":")
    imported = importlib.import_module(module)
    if _SOURCES[name].endswith(":"):
        return imported
    # the second in PyTorch 2.11 and 2.12
    for known_as in (torch_name or name, name.replace("_single_", "_tensor_")):
        with contextlib.suppress(AttributeError):
            return attrgetter(known_as)(imported)
    version = importlib.import_module("torch").__version__
    raise UserError(
        f"torch {version} has no {module}.{name}, which this feature needs; install torch 2.13 or "
        "newer"
    )


def compiler_statistics() -> ModuleType | None:
    """Return torch.compile's counters, which `torch.compiler` lacks, or None before compilation (a
    slow import)."""
    return sys.modules.get("torch._dynamo.utils")


def flop_formulas() -> "dict[OpOverloadPacket, Callable[..., int]]":
    """Return operation → function of its arguments that counts floating-point operations, as in
    `FlopCounterMode`, but also of `torch.nn.functional.grouped_mm`: products of groups of rows (N,
    K) with a matrix each (E, K, M), or of groups of columns (K, N) with groups of rows (N, M), as
    for the gradient of the matrices."""
    import torch
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    if torch.ops.aten._grouped_mm not in flop_registry:
        register_flop_formula(torch.ops.aten._grouped_mm)(
            lambda a, b, *_, **__: 2 * a.numel() * b[-1]
        )
    return flop_registry


def converting_operation() -> "OpOverload":
    """Return the operation of `Tensor.to` that copies."""
    import torch

    operation: OpOverload = torch.ops.aten._to_copy.default
    return operation


def cpu_attention_operation() -> "OpOverload":
    """Return the operation of `scaled_dot_product_attention` on the CPU."""
    import torch

    operation: OpOverload = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    return operation


def reading_operation() -> "OpOverload":
    """Return the operation that reads a value of a tensor, such as `Tensor.item`."""
    import torch

    operation: OpOverload = torch.ops.aten._local_scalar_dense.default
    return operation


def fused_attention() -> "OpOverloadPacket":
    """Return the operation of attention that keeps no weights, for queries, keys and values with
    the same number of heads, with `attn_mask`. Its first result is attention's output."""
    import torch

    operation: OpOverloadPacket = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return operation


def product_operations() -> "list[OpOverload]":
    """Return the operations of a linear layer, as the operators that a checkpointing policy sees:
    without bias, with bias, on MPS, and in float8."""
    import torch

    aten = torch.ops.aten
    return [aten.mm.default, aten.addmm.default, aten.linear.default, aten._scaled_mm.default]


def onednn_linear() -> "OpOverload | None":
    """Return the operation of a linear layer by oneDNN, without gradients, with the arguments
    input, weight, bias, and "none", [], "" (nothing follows); None if PyTorch is built without
    oneDNN. `F.linear` calls it for bfloat16 only."""
    import torch

    return (
        torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None
    )


def cpu_kernel(name: str) -> Callable[..., Any]:
    """Return PyTorch's implementation of the operation `aten::name` for CPUs, which a replacement
    may call. `torch.library` takes the keys of its dispatch in a private type only."""
    import torch

    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
    keys = torch._C.DispatchKeySet(torch.DispatchKey.CPU)
    return functools.partial(kernel.call_boxed, keys)


def attention_operations() -> "list[OpOverload | HigherOrderOperator]":
    """Return the attention operations, as the operators that a checkpointing policy sees."""
    import torch
    import torch.nn.attention.varlen  # registers an operator

    aten = torch.ops.aten
    return [
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_fused_attention_overrideable.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_attention_math_for_mps.default,
        torch.ops.higher_order.flex_attention,
        torch.ops.torch_attn._varlen_attn.default,
    ]


def cpu_attention_products(
    q_BHLD: "Tensor", k_BKSD: "Tensor", v_BKSD: "Tensor", mask: "Tensor | None", scale: float
) -> "tuple[Tensor, Tensor]":
    """Return the results of PyTorch's attention on a CPU, causal without a mask, and the
    log-sum-exp of each query's scores (B, H, L), which the public function keeps to itself."""
    import torch

    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = attend(q_BHLD, k_BKSD, v_BKSD, 0.0, mask is None, attn_mask=mask, scale=scale)
    return out, lse


def cpu_attention_gradients(
    grad_BHLD: "Tensor",
    q_BHLD: "Tensor",
    k_BKSD: "Tensor",
    v_BKSD: "Tensor",
    out_BHLD: "Tensor",
    lse_BHL: "Tensor",
    mask: "Tensor | None",
    scale: float,
) -> "tuple[Tensor, Tensor, Tensor]":
    """Return the gradients of queries, keys and values of `cpu_attention_products`."""
    import torch

    differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    inputs = (grad_BHLD, q_BHLD, k_BKSD, v_BKSD, out_BHLD, lse_BHL, 0.0, mask is None)
    grad_q, grad_k, grad_v = differentiate(*inputs, attn_mask=mask, scale=scale)
    return grad_q, grad_k, grad_v


def fuse_collectives_with_products(group: str) -> None:
    """Make the compiler fuse collectives of a process group, by name, with matrix products, in
    shared memory."""
    import warnings

    import torch._inductor.config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group
    from torch.distributed.distributed_c10d import GroupName

    torch._inductor.config._micro_pipeline_tp = True
    with warnings.catch_warnings():
        # PyTorch 2.13 calls it deprecated, but its compiler fuses only groups for which it was
        # called.
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(GroupName(group))


def choose_compiled_code_by_age() -> None:
    """Make a compiled function use the oldest of its code that fits the inputs instead of the
    latest used code."""
    import torch

    torch._C._dynamo.eval_frame._set_lru_cache(False)  # type: ignore[attr-defined]


def communication_operations() -> "list[OpOverload]":
    """Return the collectives that leave each rank with a part, as the operators that a
    checkpointing policy sees."""
    import torch

    collectives = torch.ops._c10d_functional
    return [collectives.reduce_scatter_tensor.default, collectives.all_to_all_single.default]


def write_count(tensor: "Tensor") -> int:
    """Return how often a tensor has been changed in place; changes through `Tensor.data` do not
    count. On the meta device, no public interface tells this."""
    return tensor._version


@contextlib.contextmanager
def keep_write_count(tensor: "Tensor") -> Iterator[None]:
    """Do not count changes of a tensor in the block, so that a backward pass accepts a saved tensor
    whose memory was freed and is filled again with the same values."""
    import torch

    with torch.autograd._unsafe_preserve_version_counter(tensor):
        yield


def process_groups() -> list["dist.ProcessGroup"]:
    """Return all process groups of this process, which PyTorch lists nowhere else."""
    from torch.distributed import distributed_c10d

    return list(distributed_c10d._world.pg_map)


def set_default_timeout(timeout: "timedelta | None") -> None:
    """Set the timeout of process groups that are made without one; None: PyTorch's own.
    `init_device_mesh` takes no timeout, and gives its groups this one."""
    from torch.distributed import constants, distributed_c10d

    distributed_c10d.default_pg_timeout = timeout or constants.default_pg_timeout
    distributed_c10d.default_pg_nccl_timeout = timeout or constants.default_pg_nccl_timeout


def allocate(module: "nn.Module", device: "torch.device | str") -> None:
    """Give the tensors of a module on the meta device memory on `device`, in place, like
    `Module.to_empty`. That asks a meta tensor for the order of its dimensions in memory, and so
    imports sympy, which takes half a second at the start of a run; contiguous ones need not ask."""
    import torch

    def empty(x: "Tensor") -> "Tensor":
        if is_dtensor(x) or not x.is_contiguous():
            return torch.empty_like(x, device=device)
        return torch.empty_like(x, device=device, memory_format=torch.contiguous_format)

    module._apply(empty)


def dtensor_like(local: "Tensor", like: "DTensor") -> "DTensor":
    """Return a DTensor with the layout of `like`. Unlike `DTensor.from_local`, leave `local` on its
    device."""
    from torch.distributed.tensor import DTensor

    return DTensor(local, like._spec, requires_grad=False)


def active_fake_mode() -> "FakeTensorMode | None":
    """Return the active `FakeTensorMode`, or None."""
    import torch

    mode: FakeTensorMode | None = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return mode


def like_fake_tensor(
    example: "FakeTensor",
) -> "Callable[[torch.UntypedStorage | None, FakeTensorMode | None], FakeTensor]":
    """Return a function that makes fake tensors of the size, type and place of `example`, which an
    operation has returned, in new memory (None) or in that of another tensor, for a
    `FakeTensorMode`. FakeTensor's own constructor takes a tenth of the time of a dry run."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    shape, strides = tuple(example.shape), example.stride()
    offset = example.storage_offset()
    dtype, device = example.dtype, example.fake_device
    attributes = {name: value for name, value in vars(example).items() if name != "fake_mode"}

    def make(storage: "torch.UntypedStorage | None", mode: "FakeTensorMode | None") -> "FakeTensor":
        with torch._C._DisableTorchDispatch():
            if storage is None:
                meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            else:
                meta = torch.empty(0, dtype=dtype, device="meta")
                meta.set_(storage, offset, shape, strides)
        fake = torch.Tensor._make_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
        )
        vars(fake).update(attributes, fake_mode=mode)
        torch._C._set_throw_on_mutable_data_ptr(fake)
        return fake

    return make


def storage_key(storage: "torch.UntypedStorage") -> int:
    """Return the identity of a live storage; a fake one has no `data_ptr`."""
    return storage._cdata


def storage_references(storage: "torch.UntypedStorage") -> int:
    """Return how many tensors and storages refer to the memory of a live storage."""
    import torch

    return torch._C._storage_Use_Count(storage._cdata)


def offset_in_file(storage: "torch.UntypedStorage") -> int | None:
    """Return the offset of a fake storage from `torch.load` in its file, in an attribute that
    PyTorch documents."""
    return getattr(storage, "_checkpoint_offset", None)


def written_arguments(
    func: "OpOverload", args: tuple[object, ...], kwargs: dict[str, object]
) -> list[object]:
    """Return the arguments that an operation writes, by its schema; none if it returns only new
    tensors or views."""
    names, written = _arguments_of(func)
    if not written:
        return []
    by_name = dict(zip(names, args, strict=False)) | kwargs
    return [by_name.get(name) for name in written]


@functools.cache
def _arguments_of(func: "OpOverload") -> tuple[list[str], list[str]]:
    """Return the names of an operation's arguments, and of those that it writes."""
    arguments = func._schema.arguments
    written = [
        one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write
    ]
    return [one.name for one in arguments], written


def multiply_all(tensors: "list[torch.Tensor]", factor: "torch.Tensor") -> None:
    """Multiply plain tensors of one device and type in place by a scalar tensor, in few kernels; no
    public function multiplies many tensors that are not the gradients of parameters."""
    import torch

    torch._foreach_mul_(tensors, factor)


def is_process_group(value: object) -> "TypeGuard[torch.ScriptObject]":
    """Return whether an operation's argument is a process group, boxed for TorchScript without a
    public class."""
    import torch

    return isinstance(value, torch.ScriptObject) and str(value._type()).endswith(".ProcessGroup")


def fsdp_parameters(modules: Iterable["nn.Module"]) -> "Iterator[FSDPParam]":
    """Yield FSDP's record of each parameter that it shards or replicates, which also shows gathered
    weights."""
    from torch.distributed.fsdp import FSDPModule

    for module in modules:
        for group in (
            module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else []
        ):
            yield from group.fsdp_params


class _Chunks:
    """The parts of a tensor for `n` ranks along a dimension, as in `torch.chunk`; parts of further
    ranks are empty."""

    def __init__(self, tensor: "torch.Tensor", n: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._size = -(-tensor.shape[dim] // n)

    def __getitem__(self, rank: int) -> "torch.Tensor":
        start, end = rank * self._size, self._tensor.shape[self._dim]
        if start >= end > 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._size, end - start))


@contextlib.contextmanager
def cutting_own_shards() -> Iterator[None]:
    """Let FSDP cut only the shard of this rank from a parameter in the block. It makes one for each
    rank, which takes seconds per thousand ranks and is most of its work on tensors without
    memory."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    original = _fsdp_param._chunk_with_empty
    _fsdp_param._chunk_with_empty = _Chunks  # type: ignore[assignment]
    try:
        yield
    finally:
        _fsdp_param._chunk_with_empty = original


def gathered_weights(record: "FSDPParam") -> list["Tensor"]:
    """Return the whole weight of an `fsdp_parameters` record, after it was first gathered; FSDP
    hides it."""
    return [record._unsharded_param] if hasattr(record, "_unsharded_param") else []


def n_shards(record: "FSDPParam") -> int:
    """Return the number of ranks that FSDP gathers the parameter of an `fsdp_parameters` record
    from."""
    return getattr(record.mesh_info, "shard_mesh_size", 1)


def owner_of(record: "FSDPParam") -> "nn.Module":
    """Return the module with the parameter of an `fsdp_parameters` record."""
    return record._module_info.module


def extend_gather(
    record: "FSDPParam", before: Callable[..., object], after: Callable[..., object]
) -> None:
    """Let FSDP gather what `before` returns for the shard of an `fsdp_parameters` record, and use
    what `after` makes of it. The public way is a class of shards with these methods, which
    optimizers and checkpoints would meet too."""
    assert is_dtensor(record.sharded_param)
    shard = record.sharded_param._local_tensor
    vars(shard).update(fsdp_pre_all_gather=before, fsdp_post_all_gather=after)
    record._init_extensions()


def pipeline_stages(schedule: "_Schedule") -> "list[PipelineStage]":
    """Return this rank's stages of a pipeline schedule, which has no public list of them."""
    one_or_several = vars(schedule)
    stages: list[PipelineStage] = one_or_several.get("_stages") or [one_or_several["_stage"]]
    return stages


def adjust_microbatches(
    schedule: "_Schedule", adjust: "Callable[[_KeywordArguments], None]"
) -> None:
    """Call `adjust` with the keyword arguments of each micro-batch of a schedule, after PyTorch has
    divided them."""
    split = schedule._split_inputs

    def split_and_adjust(
        args: tuple[object, ...], kwargs: dict[str, object] | None
    ) -> "tuple[list[tuple[object, ...]], _KeywordArguments]":
        parts, keyword_parts = split(args, kwargs)
        adjust(keyword_parts)
        return parts, keyword_parts

    vars(schedule)["_split_inputs"] = split_and_adjust


def skip_shape_vote(schedule: "_Schedule") -> None:
    """Make a schedule's stages accept their declared shapes without a vote of all ranks; no public
    switch exists."""
    from torch.distributed.pipelining.stage import InferenceMode

    def skip(stages: "list[PipelineStage]", has_backward: bool, p2p_done: bool) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    vars(schedule)["_warmup_p2p"] = skip


def parameter_entries(module: "nn.Module") -> dict[str, Any]:
    """Return a module's dictionary of its own parameters. In the dictionary, any tensor may replace
    a parameter; attributes refuse this."""
    return module._parameters


def forward_hooks(module: "nn.Module | None") -> list[Callable[..., object]]:
    """Return the functions called before and after a module's `forward`, with None of every
    module; the public interface can only add them."""
    import torch.nn.modules.module as of_all

    if module is None:
        return [*of_all._global_forward_pre_hooks.values(), *of_all._global_forward_hooks.values()]
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def end_loader_workers(iterator: "_MultiProcessingDataLoaderIter") -> None:
    """End the worker processes of a `DataLoader`'s iterator, which has no `close`."""
    iterator._shutdown_workers()
    for process in iterator._workers:
        process.kill()  # one may be stuck, for example in a download; the others have ended
