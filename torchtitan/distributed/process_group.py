"""Start and end of the process group, and the few collectives that the loop needs."""

import contextlib
import ipaddress
import os
import socket
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.config import CommConfig
from torchtitan.tools.errors import UserError
from torchtitan.tools.torch_private import process_groups, set_group_timeout

_POLL_SECONDS = 0.05

_made_here = False  # if true, this module destroys the process group


def world_size() -> int:
    """Return the number of processes in the group, else the launcher's; 1 without a launcher."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def init_process_group(device_type: str, comm: CommConfig) -> torch.device:
    """Join the other processes, if any, and return this process's device; use any existing process group."""
    global _made_here
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if world_size() > 1 and not dist.is_initialized():
        # gloo in addition to nccl: object broadcasts and asynchronous checkpoints communicate from the host.
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        # With a device, NCCL connects here, so that failures appear here and barriers know their device.
        device_id = device if device_type == "cuda" else None
        timeout = timedelta(seconds=comm.init_timeout_seconds)
        rank, size = int(os.environ["RANK"]), world_size()
        on_loopback = _is_loopback(os.environ.get("MASTER_ADDR", ""))
        if on_loopback or os.environ.get("LOCAL_WORLD_SIZE") == str(size):
            _keep_gloo_on_loopback()
        store = None  # made by PyTorch
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = attempt_store(rank, size, timeout)
        elif on_loopback:
            store = _loopback_store(rank, size, timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device_id)
        _made_here = True
    return device


def _is_loopback(address: str) -> bool:
    """Return whether an address shows by itself that all ranks are on this host; the host's own name does not."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _keep_gloo_on_loopback() -> None:
    """Let gloo listen on the loopback interface, not on the interface of the host's name, unless the user chose one."""
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _loopback_store(rank: int, size: int, timeout: timedelta) -> dist.TCPStore:
    """Return a store on a loopback address: PyTorch's own (2.13) lets anyone on any interface write to it."""
    address, text = os.environ["MASTER_ADDR"], os.environ.get("MASTER_PORT", "")
    place = f"MASTER_ADDR:MASTER_PORT is '{address}:{text}'"
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise UserError(f"{place}, and must end with a port, the same for all ranks: a number below 65536")
    port = int(text)
    with _listener(address, port, place) if rank == 0 else contextlib.nullcontext() as listener:
        # Multi-tenant like PyTorch's own, whose server lives as long as a store in this process uses it.
        return dist.TCPStore(
            address, port, size, is_master=rank == 0, timeout=timeout, multi_tenant=True, master_listen_fd=listener
        )


@contextlib.contextmanager
def _listener(address: str, port: int, place: str) -> Iterator[int]:
    """Yield the descriptor of a listening socket, which the block takes over; close it if the block fails earlier."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        descriptor = socket.create_server((address, port), family=family).detach()
    except OSError as error:
        raise UserError(
            f"{place}, where rank 0 cannot listen ({os.strerror(error.errno or 0)}); choose another port"
        ) from error
    inode = os.fstat(descriptor).st_ino
    try:
        yield descriptor
    except BaseException:
        # A store that fails late has closed it, and another file may have its number now.
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino == inode:
                os.close(descriptor)
        raise


def attempt_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return the store of torchrun's agent with a prefix unique to the processes of this attempt.

    The agent keeps one store over all restarts, and PyTorch (2.13) reuses its keys: a fast rank would find a dead
    predecessor's address, fail to connect, and waste a restart. Restart counts may differ between hosts, so each
    process sends its own number; rank 0 replies with its number, the prefix, and repeats the sender's number, unknown
    to a dead rank 0. Raise `TimeoutError` if the other processes do not come.
    """
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
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
    raise TimeoutError("the processes of this attempt did not all come (--comm.init_timeout_seconds)")


def _welcome(store: dist.Store, own: str, world_size: int) -> Iterator[str | None]:
    """Reply to all others; yield the prefix once all have confirmed it, None before: a dead process may be replaced."""
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
    """Yield rank 0's number once it has replied to this process, None before."""
    store.set(f"hello/{rank}", own)
    while True:
        prefix, number = store.get(f"reply/{rank}").decode().split()
        if number == own:
            store.set(f"hello/{rank}", f"{own} {prefix}")
            yield prefix
        yield None


def set_timeouts(seconds: float) -> None:
    """Set the timeout of training's collectives, in the default group and the meshes' groups. Other groups keep theirs:
    in the checkpointer's, ranks may wait for a rank that writes a whole model."""
    if not dist.is_initialized():
        return
    for group in process_groups():
        # PyTorch's names for groups of meshes, including meshes that are flattened later.
        if group is dist.group.WORLD or group.group_desc.startswith("mesh_"):
            set_group_timeout(timedelta(seconds=seconds), group)


def destroy_process_group() -> None:
    """Leave our process group together: an early teardown can abort a rank that is still in a collective."""
    global _made_here
    if _made_here:
        dist.barrier()
        dist.destroy_process_group()
        _made_here = False


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Sum `values` element by element over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def on_all_ranks(condition: bool) -> bool:
    """Return whether `condition` holds in every process."""
    return all(gather_objects(condition))


def gather_objects(value: Any) -> list[Any]:
    """Return every process's `value`, by rank."""
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
