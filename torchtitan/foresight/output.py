"""Prediction as text: the time of a step, and a bar of where it goes."""

from torchtitan.foresight.devices import Device
from torchtitan.foresight.prediction import Prediction

_WIDTH = 40


def describe(prediction: Prediction, device: Device) -> str:
    """Return lines with the step's time, speed, utilization, and a bar for each part of the step."""
    lines = [
        f"Step on {device.name}: {prediction.seconds:,.3g} s, {prediction.tokens_per_second:,.0f} tokens/s per device, "
        f"MFU {prediction.mfu:.1%}"
    ]
    for name, seconds in sorted(prediction.time.parts.items(), key=lambda part: -part[1]):
        share = seconds / prediction.seconds
        lines.append(f"  {name:<18}{'█' * max(1, round(_WIDTH * share)):<{_WIDTH}} {share:6.1%} {seconds:9.3g} s")
    return "\n".join(lines)
