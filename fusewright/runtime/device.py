"""What a device can do: a few measured rates, taken once and cached per device, PyTorch version and thread count."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.benchmark import Timer

from fusewright.errors import UnsupportedError
from fusewright.runtime.cache import cache_directory, write_atomic

# Bump when what is measured changes.
REVISION = 4


@dataclass(frozen=True)
class DeviceFacts:
    """Measured rates of one device.

    conv, matmul      FLOP/s of a mid-sized float32 convolution and matrix product under the default flags
    wide              FLOP/s of a float64 matrix product
    memory, reduce    bytes/s of a pointwise operation (read and written) and of a sum along the innermost dimension
    window            elements x taps per second of average and max pooling
    launch            seconds that one operation costs however small it is
    """

    name: str
    conv: float
    matmul: float
    wide: float
    memory: float
    reduce: float
    window: float
    launch: float


# What a plan for a GPU that is not here goes by: about an H200.
LARGE_GPU = DeviceFacts(
    "a large GPU", conv=1e14, matmul=5e13, wide=5e13, memory=4e12, reduce=4e12, window=3e11, launch=3e-6
)


@lru_cache(maxsize=16)
def device_facts(device: torch.device) -> DeviceFacts:
    """The facts of `device`, from the cache or measured now (a second or two)."""
    name = device_name(device)
    key = hashlib.sha256(f"{REVISION} {name} {torch.__version__} {torch.get_num_threads()}".encode()).hexdigest()[:16]
    try:
        path = cache_directory() / f"device-{key}.json"
    except UnsupportedError:
        return _measured(name, device)  # no safe cache: measure every time
    found = _read(path)
    if found is not None:
        return found
    facts = _measured(name, device)
    with suppress(OSError):  # a full or read-only disk costs the next run its head start, nothing more
        write_atomic(path, json.dumps(asdict(facts), indent=1).encode())
    return facts


def _read(path: Path) -> DeviceFacts | None:
    """What a file says, where that is rates."""
    try:
        found = DeviceFacts(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    rates = (rate for name, rate in asdict(found).items() if name != "name")
    return found if all(isinstance(rate, float) and rate > 0 for rate in rates) else None


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()} {device.type}"


def capability_of(device: torch.device) -> int | None:
    """A GPU's compute capability times ten; `None` for a CPU, and where there is no GPU to ask."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _measured(name: str, device: torch.device) -> DeviceFacts:
    scale = 4 if device.type == "cuda" else 1

    def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.rand(shape, dtype=dtype, device=device)

    image, weight = rand(8 * scale * scale, 32, 64, 64), rand(32, 32, 3, 3)
    side = 512 * scale
    a, b = rand(side, side), rand(side, side, dtype=torch.float64)
    long, small = rand(scale * scale * 64, 1 << 16), rand(16)
    with torch.no_grad():
        conv = _seconds(lambda: F.conv2d(image, weight, padding=1))
        matmul = _seconds(lambda: a @ a)
        wide = _seconds(lambda: b @ b)
        memory = _seconds(lambda: long * 2.0)
        reduce = _seconds(lambda: long.sum(1))
        window = _seconds(lambda: F.avg_pool2d(image, 4))
        launch = _seconds(lambda: small * 2.0)
    return DeviceFacts(
        name=name,
        conv=2 * image.numel() * 32 * 9 / conv,
        matmul=2 * side**3 / matmul,
        wide=2 * side**3 / wide,
        memory=8 * long.numel() / memory,
        reduce=4 * long.numel() / reduce,
        window=image.numel() / window,
        launch=launch,
    )


def _seconds(call: Callable[[], object]) -> float:
    """The median time of a call, over at least 50 ms."""
    call()
    return float(Timer("call()", globals={"call": call}).blocked_autorange(min_run_time=0.05).median)
