"""The choice of a device."""

from pathlib import Path

import pytest
import torch

from torchtitan.tools import device
from torchtitan.tools.errors import UserError


def test_a_driver_that_cannot_run_cuda_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """NVML counts GPUs, CUDA does not start; training on the CPU would be a surprise."""
    driver = tmp_path / "version"
    driver.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023\n"
    )
    monkeypatch.setattr(device, "_DRIVER", driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(
        UserError,
        match=r"8 GPU\(s\) are present, but the NVIDIA driver 535\.54\.03 cannot .* update",
    ):
        device.device_type()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert device.device_type() in ("cpu", "mps")
