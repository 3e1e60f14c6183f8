"""The process group: initialization, destruction, timeouts, store, and addresses."""

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.processes import run_processes
from torchtitan.config import CommConfig
from torchtitan.distributed import process_group
from torchtitan.distributed.process_group import attempt_store
from torchtitan.tools.errors import UserError


def use_existing_group(folder: Path) -> None:
    os.environ["WORLD_SIZE"] = "7"  # the group has priority over the environment
    device = process_group.init_process_group("cpu", CommConfig())
    assert device == torch.device("cpu")
    assert process_group.world_size() == 2
    assert process_group.sum_over_ranks(torch.ones(1)).item() == 2
    process_group.destroy_process_group()
    assert dist.is_initialized()
    (folder / f"rank {dist.get_rank()} is done").touch()


def test_an_existing_group_is_used_and_not_destroyed(tmp_path: Path) -> None:
    run_processes(use_existing_group, 2, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def create_and_destroy(folder: Path, port: int) -> None:
    rank = dist.get_rank()
    dist.destroy_process_group()
    # another port than the old group, which rank 0 may still hold
    os.environ["MASTER_PORT"] = str(port)
    process_group.init_process_group("cpu", CommConfig(init_timeout_seconds=60))
    assert process_group.gather_objects(rank) == [0, 1]
    process_group.destroy_process_group()
    assert not dist.is_initialized()
    process_group.destroy_process_group()  # has no effect without a group
    (folder / f"rank {rank} is done").touch()
    # The caller destroys a group at the end.
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)


def test_a_created_group_is_destroyed(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    run_processes(create_and_destroy, 2, tmp_path, port)
    assert len(list(tmp_path.glob("rank * is done"))) == 2


def wait_for_timeouts(folder: Path) -> None:
    """Rank 0 waits for rank 1 in the groups of meshes, of checkpoints, and in the default group,
    and all time out, also in groups made later, by this package or directly."""
    rank = dist.get_rank()
    mesh = process_group.new_mesh("cpu", {"a": 1, "b": 3})
    side_group = process_group.new_cpu_group()
    process_group.set_timeouts(1)
    later_groups = (process_group.new_cpu_group(), dist.new_group())
    split = process_group.split_mesh(mesh, "b", (1, 3), ("c", "d"))
    groups = [mesh.get_group("b"), side_group, *later_groups, split.get_group("d"), None]
    end_of_wait = time.monotonic() + 2 + 1.5 * len(groups)
    if rank == 0:
        for group in groups:
            start = time.monotonic()
            with pytest.raises(
                process_group.RankTimeout,
                match='hangs in phase "waiting": another rank does not ans',
            ):
                with process_group.timeouts_named(lambda: "waiting"):
                    dist.all_reduce(torch.ones(1), group=group)
            assert time.monotonic() - start < 2.5, (
                "the group's first timeout is 30 minutes, the default group's 2"
            )
    else:
        time.sleep(max(0.0, end_of_wait - time.monotonic()))
    (folder / f"rank {rank} is done").touch()
    time.sleep(max(0.0, end_of_wait + 1 - time.monotonic()))
    os._exit(0)  # a group that timed out cannot be destroyed cleanly


@pytest.mark.slow
def test_timeouts_take_effect(tmp_path: Path) -> None:
    run_processes(wait_for_timeouts, 3, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.slow
def test_each_attempt_has_a_separate_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of torchrun keeps the keys of earlier attempts, also of one whose process died
    during startup."""
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(server.port))

    def attempt(order: list[int]) -> set[str]:
        """Start the ranks one after the other; return the values that they read after rank 0 has
        written."""
        with ThreadPoolExecutor(3) as threads:
            started = []
            for rank in order:
                started.append(threads.submit(attempt_store, rank, 3, timedelta(seconds=60)))
                time.sleep(0.2)
            stores = [future.result(60) for future in started]
        assert not any(store.check(["key"]) for store in stores), (
            "the store has keys of an earlier attempt"
        )
        stores[0].set("key", str(order))
        return {store.get("key").decode() for store in stores}

    assert attempt([0, 1, 2]) == {"[0, 1, 2]"}
    assert attempt([2, 0, 1]) == {"[2, 0, 1]"}
    dist.PrefixStore("torchtitan", server).set("hello/1", "a process that then died")
    assert attempt([0, 2, 1]) == {"[0, 2, 1]"}


def test_cuda_gets_a_device_id(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(process_group, "_created_here", False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **settings: calls.append((backend, settings))
    )
    for name, value in {"WORLD_SIZE": "8", "RANK": "3", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    device = process_group.init_process_group("cuda", CommConfig())
    ((backend, settings),) = calls
    assert backend == "cpu:gloo,cuda:nccl"
    assert settings["device_id"] == device == torch.device("cuda", 3)


@pytest.mark.parametrize(
    ("address", "on_loopback"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("::1", True),
        ("10.0.0.1", False),
        ("node-1", False),
        ("", False),
    ],
)
def test_loopback_addresses_use_a_loopback_store(
    monkeypatch: pytest.MonkeyPatch, address: str, on_loopback: bool
) -> None:
    """With any other address, PyTorch creates the store, so that several hosts can connect."""
    stores = []
    monkeypatch.setattr(process_group, "_created_here", False)
    monkeypatch.setattr(process_group, "_loopback_store", lambda *_: "ours")
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, *, store, **_: stores.append(store)
    )
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    del os.environ["GLOO_SOCKET_IFNAME"]
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": address}.items():
        monkeypatch.setenv(name, value)
    process_group.init_process_group("cpu", CommConfig())
    assert stores == ["ours" if on_loopback else None]
    assert os.environ.get("GLOO_SOCKET_IFNAME", "").startswith("lo") == on_loopback


def free_port(monkeypatch: pytest.MonkeyPatch) -> int:
    """Set `MASTER_ADDR` and `MASTER_PORT` to a free port of a loopback address; return the port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    return port


def test_a_loopback_store_listens_only_on_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port(monkeypatch)
    store = process_group._loopback_store(0, 1, timedelta(seconds=60))
    store.set("key", "value")
    socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))


def test_a_port_in_use_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port(monkeypatch)
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(
            UserError,
            match=rf"^MASTER_ADDR:MASTER_PORT is '127.0.0.1:{port}'.*\(Address already in use\)",
        ),
    ):
        process_group._loopback_store(0, 1, timedelta(seconds=60))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("port", [None, "", "no", "0", "65536"])
def test_an_invalid_port_is_rejected(
    monkeypatch: pytest.MonkeyPatch, rank: int, port: str | None
) -> None:
    free_port(monkeypatch)
    monkeypatch.delenv("MASTER_PORT")
    if port is not None:
        monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(
        UserError, match=rf"^MASTER_ADDR:MASTER_PORT is '127.0.0.1:{port or ''}', but the port must"
    ):
        process_group._loopback_store(rank, 2, timedelta(seconds=60))


def test_a_failed_store_leaks_no_socket_and_closes_no_other_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    port = free_port(monkeypatch)
    descriptors = []

    def fail_before_close(*_: Any, master_listen_fd: int, **__: Any) -> None:
        raise dist.DistStoreError("refused")

    def fail_after_close(*_: Any, master_listen_fd: int, **__: Any) -> None:
        """Fail like a timeout in PyTorch, which closes the socket. Its descriptor then belongs to
        another file."""
        os.close(master_listen_fd)
        descriptors.append(os.open(tmp_path, os.O_RDONLY))
        assert descriptors == [master_listen_fd]
        raise dist.DistStoreError("timed out")

    for store in (fail_before_close, fail_after_close):
        monkeypatch.setattr(dist, "TCPStore", store)
        with pytest.raises(dist.DistStoreError):
            process_group._loopback_store(0, 1, timedelta(seconds=60))
        socket.create_server(("127.0.0.1", port)).close()
    os.close(descriptors[0])  # fails if it is already closed


UNHANDLED = "NCCL error in: ProcessGroupNCCL.cpp:3690, {}, NCCL version 2.27.3\n{}"


@pytest.mark.parametrize(
    ("text", "is_lost"),
    [
        (
            "NCCL communicator was aborted on rank 1.  Original reason for failure was: timeout",
            True,
        ),
        (
            "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
            "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600004 "
            "milliseconds before timing out.",
            True,
        ),
        (
            UNHANDLED.format(
                "remote process exited or there was a network error",
                "ncclRemoteError: A call failed possibly due to a network error or a remote "
                "process exiting prematurely.\nLast error:\nNET/Socket : peer 10.0.0.2<47534> has "
                "closed the connection",
            ),
            True,
        ),
        (
            UNHANDLED.format(
                "unhandled system error (run with NCCL_DEBUG=INFO for details)",
                "ncclSystemError: System call (e.g. socket, malloc) or external library call "
                "failed or device error. \nLast error:\nsocketPollConnect: connect returned "
                "Connection refused, exceeded retry limit",
            ),
            True,
        ),
        (
            UNHANDLED.format(
                "unhandled system error (run with NCCL_DEBUG=INFO for details)",
                "ncclSystemError: System call (e.g. socket, malloc) or external library call "
                "failed or device error. \nLast error:\nError while creating shared memory segment "
                "/dev/shm/nccl-a",
            ),
            False,
        ),
        ("NCCL timeout in communicator initialization.", True),
        (
            "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d "
            "key-value store by key '0', but store->get('0') got error: wait timeout after "
            "1800000ms",
            True,
        ),
        (
            UNHANDLED.format(
                "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
                "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure "
                "'out of memory'",
            ),
            False,
        ),
        (
            UNHANDLED.format(
                "invalid usage (run with NCCL_DEBUG=WARN for details)",
                "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast "
                "error:\n"
                "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",
            ),
            False,
        ),
    ],
)
def test_errors_of_nccl(text, is_lost):
    """The texts are those of PyTorch's source, ProcessGroupNCCL.cpp and NCCLUtils.cpp."""
    error = dist.DistBackendError(text)
    assert process_group.is_lost_rank(error) is is_lost
    expected = process_group.RankTimeout if is_lost else dist.DistBackendError
    with pytest.raises(expected), process_group.timeouts_named(lambda: "save"):
        raise error
