"""What this machine can do at best, measured: the denominators of every floor that Redline prints."""

import torch

from redline.bench.record import cpu_name
from redline.kernels.rates import WORKING_SET_BYTES, product_rate, read_rate
from redline.ops.op import Machine

TRIES = 3  # of reading, with products between them: a moment in which others read does not last through all


def measure(device: torch.device | None = None, working_set_bytes: int = WORKING_SET_BYTES, rounds: int = 5) -> Machine:
    """Bytes/s read over `working_set_bytes`, and operations/s of matrix products: the higher of bf16 and float32.

    device: the CPU where none is given, with torch's current number of threads. working_set_bytes: give the bytes that
    one step reads, since a small model may live in the last-level cache, where its floor is lower than memory's.
    rounds: of about ten milliseconds, for each way to reach a limit. Bandwidth is the best of TRIES. Takes seconds.
    """
    device = device or torch.device("cpu")
    tries = [
        (read_rate(device, working_set_bytes, rounds), product_rate(device, max(1, rounds // TRIES)))
        for _ in range(TRIES)
    ]
    reads, multiplies = zip(*tries, strict=True)
    return Machine(device_name(device), max(reads), max(multiplies))


def device_name(device: torch.device) -> str:
    """The chip, as it calls itself; for a CPU with the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"
