"""Measures the best rates of this machine: the denominators of every floor that Redline prints."""

import torch

from redline.bench.record import cpu_name
from redline.kernels.rates import WORKING_SET_BYTES, product_rate, read_rate
from redline.ops.op import PeakRates

TRIES = 3  # measurements of bandwidth, with products in between, so that a burst of other reads does not affect all


def measure(
    device: torch.device | None = None, working_set_bytes: int = WORKING_SET_BYTES, rounds: int = 5
) -> PeakRates:
    """Bytes/s of reading `working_set_bytes`, and operations/s of matrix products: the higher of bf16 and float32.

    device: default the CPU, with torch's current number of threads. working_set_bytes: the bytes that one step reads; a
    small model may fit into the last-level cache, where its floor is lower than that of memory. rounds: of about ten
    milliseconds, for each way to reach a limit. Bandwidth is the best of TRIES. The measurement takes seconds.
    """
    device = device or torch.device("cpu")
    tries = [
        (read_rate(device, working_set_bytes, rounds), product_rate(device, max(1, rounds // TRIES)))
        for _ in range(TRIES)
    ]
    reads, multiplies = zip(*tries, strict=True)
    return PeakRates(device_name(device), max(reads), max(multiplies))


def device_name(device: torch.device) -> str:
    """The name that the chip reports; for a CPU with the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"
