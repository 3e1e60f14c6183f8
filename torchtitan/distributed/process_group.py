"""All process groups: their start, timeouts and end, and the few collectives that the loop
needs."""

import contextlib
import ipaddress
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan.config import CommConfig
from torchtitan.distributed.connections import recorded
from torchtitan.tools.errors import RunFailure, UserError, in_words
from torchtitan.tools.torch_private import flatten_mesh as _flatten
from torchtitan.tools.torch_private import process_groups, set_default_timeout, set_group_timeout
from torchtitan.tools.torch_private import split_mesh as _split

T = TypeVar("T")

_POLL_SECONDS = 0.05

_GLOO_ERRORS = ("gloo/transport", "Application timeout caused pair closure")
"""Parts of gloo's messages about other ranks: a path in its source, and the text after a
timeout."""

_NCCL_ERRORS = re.compile(
    "NCCL communicator was aborted on rank|Watchdog caught collective operation timeout"
    "|Some NCCL operations have failed or timed out|NCCL timeout in communicator initialization"
    "|ncclRemoteError|retrieving ncclUniqueId from"
    r"|ncclSystemError[\s\S]*\bConnection (?:refused|reset|closed)"
)
"""Parts of the messages of PyTorch's NCCL back end (2.13) about other ranks: a watchdog that
aborted a collective, a peer that ended or refused a connection. Its other errors, such as of CUDA,
of memory or of wrong usage, are this rank's own."""

_created_here = False  # if true, this module destroys the process group


class RankTimeout(RunFailure):
    """Another rank did not answer within the timeout of a collective. A restart may succeed."""

    passing = True


def world_size() -> int:
    """Return the number of processes in the group, else the launcher's; 1 without a launcher."""
    return (
        dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    )


def init_process_group(device_type: str, comm: CommConfig) -> torch.device:
    """Join the other processes, if any, and return this process's device; use any existing process
    group."""
    global _created_here
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if world_size() > 1 and not dist.is_initialized():
        # gloo in addition to nccl: object broadcasts and asynchronous checkpoints communicate from
        # the host.
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        # With a device id, NCCL connects now, so that failures appear now and barriers know their
        # device.
        device_id = device if device_type == "cuda" else None
        timeout = timedelta(seconds=comm.init_timeout_seconds)
        if "RANK" not in os.environ:
            raise UserError(
                f"the environment variable WORLD_SIZE is {world_size()}, but RANK is not set, as "
                "launchers do; unset WORLD_SIZE, and set NGPU for the processes of this host"
            )
        rank, size = int(os.environ["RANK"]), world_size()
        on_loopback = _is_loopback(os.environ.get("MASTER_ADDR", ""))
        if on_loopback or os.environ.get("LOCAL_WORLD_SIZE") == str(size):
            _keep_gloo_on_loopback()
        store = None  # created by PyTorch
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = attempt_store(rank, size, timeout)
        elif on_loopback:
            store = _loopback_store(rank, size, timeout)
        with recorded():
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=size,
                timeout=timeout,
                device_id=device_id,
            )
        _created_here = True
    if dist.is_initialized():
        set_timeouts(comm.init_timeout_seconds)
    return device


def init_fake_group(rank: int, world_size: int) -> None:
    """Start a process group of one process that represents `world_size`; its collectives do
    nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world_size)


def init_group_in(folder: str, rank: int, world_size: int, seconds: float) -> None:
    """Start a gloo group of processes on this host that share a folder; `seconds` is the timeout of
    collectives."""
    timeout, store = timedelta(seconds=seconds), f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=world_size, timeout=timeout
    )


def new_cpu_group() -> dist.ProcessGroup | None:
    """Return a new gloo group of all ranks, for collectives in another thread, and of ranks that
    have failed in training; None without a process group."""
    if not dist.is_initialized():
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


def new_mesh(device_type: str, sizes: Mapping[str, int]) -> DeviceMesh:
    """Return a mesh of all ranks; `sizes` maps its dimensions, outermost first, to their numbers of
    ranks."""
    with recorded():
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def flatten_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh whose dimensions are joined to one, with its own group."""
    with recorded():
        flat: DeviceMesh = _flatten(mesh)
    return flat


def split_mesh(
    mesh: DeviceMesh, dimension: str | int, sizes: tuple[int, ...], names: tuple[str, ...]
) -> DeviceMesh:
    """Return a mesh with a dimension divided into several, with groups of their own."""
    with recorded():
        split: DeviceMesh = _split(mesh, dimension, sizes, names)
    return split


def _is_loopback(address: str) -> bool:
    """Return whether an address proves that all ranks are on this host; a host name does not."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _keep_gloo_on_loopback() -> None:
    """Make gloo use the loopback interface, unless the user has set another."""
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _loopback_store(rank: int, size: int, timeout: timedelta) -> dist.TCPStore:
    """Return a store that listens only on a loopback address; PyTorch's own (2.13) listens on all
    interfaces."""
    address, text = os.environ["MASTER_ADDR"], os.environ.get("MASTER_PORT", "")
    place = f"MASTER_ADDR:MASTER_PORT is '{address}:{text}'"
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise UserError(
            f"{place}, but the port must be a number from 1 to 65535, the same for all ranks"
        )
    port = int(text)
    with _listener(address, port, place) if rank == 0 else contextlib.nullcontext() as listener:
        # Multi-tenant, like PyTorch's own store: the server lives as long as any store in this
        # process uses it.
        return dist.TCPStore(
            address,
            port,
            size,
            is_master=rank == 0,
            timeout=timeout,
            multi_tenant=True,
            master_listen_fd=listener,
        )


@contextlib.contextmanager
def _listener(address: str, port: int, place: str) -> Iterator[int]:
    """Yield the descriptor of a listening socket, which the block takes over; close it if the block
    fails earlier."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        descriptor = socket.create_server((address, port), family=family).detach()
    except OSError as error:
        cause = os.strerror(error.errno or 0)
        raise UserError(
            f"{place}, but rank 0 cannot listen there ({cause}); choose another port"
        ) from error
    inode = os.fstat(descriptor).st_ino
    try:
        yield descriptor
    except BaseException:
        # A store that failed late has already closed the descriptor, and its number may belong to
        # another file.
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino == inode:
                os.close(descriptor)
        raise


def attempt_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return the store of torchrun's agent with a prefix unique to the processes of this attempt.

    The agent keeps one store over all restarts, and PyTorch (2.13) reuses its keys: a fast rank
    would find a dead predecessor's address, fail to connect, and waste a restart. Restart counts
    may differ between hosts, so each process sends its own id. Rank 0 replies with its id, which is
    the prefix, and with the sender's id, which a dead rank 0 cannot know. Raise `RankTimeout` if
    the other processes do not connect.
    """
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout
    )
    greetings, own = dist.PrefixStore("torchtitan", store), uuid.uuid4().hex
    attempts = _welcome(greetings, own, world_size) if rank == 0 else _greet(greetings, own, rank)
    deadline = time.monotonic() + timeout.total_seconds()
    with contextlib.suppress(dist.DistStoreError):  # a key did not arrive in time
        for prefix in attempts:
            if prefix is not None:
                return dist.PrefixStore(prefix, store)
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
    raise RankTimeout(
        "not all processes of this attempt connected in time; raise --comm.init_timeout_seconds"
    )


def _welcome(store: dist.Store, own: str, world_size: int) -> Iterator[str | None]:
    """Reply to the other processes; one may have died and been replaced. Yield None until all have
    confirmed the prefix, then the prefix."""
    keys = {rank: f"hello/{rank}" for rank in range(1, world_size)}
    replied: dict[int, str] = {}
    while True:
        hellos = [value.decode().split() for value in store.multi_get(list(keys.values()))]
        if all(confirmed == [own] for _, *confirmed in hellos):
            yield own
        for rank, (number, *_) in zip(keys, hellos, strict=True):
            if replied.get(rank) != number:
                store.set(f"reply/{rank}", f"{own} {number}")
                replied[rank] = number
        yield None


def _greet(store: dist.Store, own: str, rank: int) -> Iterator[str | None]:
    """Yield None until rank 0 has replied to this process, then rank 0's id, the prefix."""
    store.set(f"hello/{rank}", own)
    while True:
        prefix, number = store.get(f"reply/{rank}").decode().split()
        if number == own:
            store.set(f"hello/{rank}", f"{own} {prefix}")
            yield prefix
        yield None


def set_timeouts(seconds: float) -> None:
    """Set the timeout of collectives in all process groups, including the groups of meshes and
    checkpoints, and in later groups; PyTorch's default is 30 minutes (NCCL: 10)."""
    if not dist.is_initialized():
        return
    timeout = timedelta(seconds=seconds)
    set_default_timeout(timeout)
    for group in process_groups():
        set_group_timeout(timeout, group)


@contextlib.contextmanager
def timeouts_named(phase: Callable[[], str]) -> Iterator[None]:
    """Convert a collective's timeout or lost connection in the block to a `RankTimeout` that names
    the phase."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        raise RankTimeout(
            f'the run hangs in phase "{phase()}": another rank does not answer, is stopped, or has '
            "ended "
            f"({in_words(error)}); the limits are --comm.init_timeout_seconds and "
            "--comm.train_timeout_seconds"
        ) from error


def is_lost_rank(error: BaseException) -> bool:
    """Return whether a collective failed because another rank did not answer in time, or has
    ended."""
    if isinstance(error, (dist.DistStoreError, dist.DistNetworkError)):
        return True
    text = str(error)
    is_of_nccl = isinstance(error, RuntimeError) and _NCCL_ERRORS.search(text) is not None
    return is_of_nccl or any(part in text for part in _GLOO_ERRORS)


def destroy_process_group() -> None:
    """Leave the process group on all ranks together, since leaving early can abort a collective of
    another rank."""
    global _created_here
    if _created_here:
        dist.barrier()
        dist.destroy_process_group()
        set_default_timeout(None)
        _created_here = False


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Sum `values` element by element over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def on_all_ranks(condition: bool) -> bool:
    """Return whether `condition` holds in every process."""
    return all(gather_objects(condition))


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the `value` of every process, or of each in a group, by rank."""
    if not dist.is_initialized():
        return [value]
    gathered = [value] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group)
    return gathered
