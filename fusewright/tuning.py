"""Which groups of a graph become generated kernels, and with which tiles: measured on the device, and remembered.

A group is timed alone, on random operands of its sizes: the ATen program, and its kernel for a few tile shapes.  Times
are kept per device, group and sizes, so that another run starts with the answer.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from os import cpu_count
from typing import Any, Literal

import torch
from torch import Tensor

from fusewright.codegen import cuda
from fusewright.errors import FusewrightError, UnsupportedError
from fusewright.ir.node import Node
from fusewright.kernel import Kernel
from fusewright.plan import KernelChoice
from fusewright.runtime.cache import cache_directory, write_atomic
from fusewright.runtime.device import device_name
from fusewright.runtime.memory import is_out_of_memory
from fusewright.runtime.operators import operator
from fusewright.schedule.groups import Group, signature, sizes

# Bump when kernels change so much that old timings mean nothing.
REVISION = 1

# Seconds that measuring the groups of one model may take.
SECONDS = 20.0

# A kernel replaces ATen when its time is below this share of ATen's.
FASTER = 0.97

Mode = Literal["auto", "always", "never"]


@dataclass
class Decision:
    """What was decided for a group: the tiles of its kernel (`None`: ATen runs it), with the times in seconds."""

    option: cuda.Option | None
    generated: float | None = None
    aten: float | None = None
    tried: int = 0


@dataclass
class Tuner:
    """Decides for one graph; hand it to `fusewright.schedule.groups.cut`.

    hints       values of the batch symbols
    tf32        whether float32 convolutions, and matmuls, may use tf32
    remembered  decisions by signature, taken over without measuring (for the same model at other sizes)
    """

    device: torch.device
    hints: Mapping[Any, int]
    mode: Mode
    tf32: tuple[bool, bool]
    measure: bool = True
    remembered: Mapping[str, Decision] = field(default_factory=dict)
    progress: Callable[[str], None] = lambda _: None
    decisions: dict[str, Decision] = field(default_factory=dict)
    kernels: dict[str, Kernel] = field(default_factory=dict)
    choices: list[KernelChoice] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def __call__(self, group: Group) -> Node | None:
        """The node that stands for `group`, or `None` where it stays as it is."""
        if group.root.device != self.device:
            return None
        key = signature(group)
        name = self._fresh(group.name)
        decision = self.remembered.get(key) or self.decisions.get(key)
        if decision is None:
            decision = self._decided(group, name)
        if decision is None:
            return None
        self.decisions[key] = decision
        path: Literal["generated", "ATen"] = "ATen" if decision.option is None else "generated"
        times = (decision.generated, decision.aten, decision.tried)
        self.choices.append(KernelChoice(name, group.family, group.root.where, path, *times))
        if decision.option is None:
            return None
        self.kernels[name] = self._kernel(group, name, decision.option)
        return group.fused(name)

    def _fresh(self, name: str) -> str:
        fresh, count = name, 1
        while fresh in self.kernels:
            count += 1
            fresh = f"{name}_{count}"
        return fresh

    def _kernel(self, group: Group, name: str, option: cuda.Option) -> Kernel:
        convolutions, matmuls = self.tf32
        return cuda.generate(group, name, option, tf32=convolutions if group.family == "contraction" else matmuls)

    def _decided(self, group: Group, name: str) -> Decision | None:
        """The decision for a group met for the first time; `None` where no kernel can be made."""
        options = cuda.options(group, self.hints)
        if not options:
            return None
        if not self.measure:
            return Decision(options[0])
        path = self._remembered_at(group)
        found = None if path is None else _read(path)
        if found is None:
            found = self._measured(group, name, options)
            if path is not None and found.aten is not None:
                write_atomic(path, json.dumps(vars(found)).encode())
        if found.option is not None and self.mode == "auto" and found.generated is not None and found.aten is not None:
            slower = found.generated > FASTER * found.aten
            return Decision(None if slower else found.option, found.generated, found.aten, found.tried)
        return found

    def _remembered_at(self, group: Group) -> Any:
        """The file that keeps a group's times; `None` where no directory is safe to use."""
        shapes = [sizes(n, self.hints) for n in group.operands]
        key = f"{REVISION} {device_name(self.device)} {torch.__version__} {self.tf32} {signature(group)} {shapes}"
        try:
            return cache_directory() / f"tuned-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
        except UnsupportedError:
            return None

    def _measured(self, group: Group, name: str, options: list[cuda.Option]) -> Decision:
        """Times of ATen and of the kernel's best tile shape."""
        try:
            operands = [_random(n, self.hints, self.device) for n in group.operands]
        except RuntimeError as error:
            if is_out_of_memory(error):
                return Decision(options[0])
            raise
        if time.monotonic() - self.started > SECONDS:
            options = options[:1]
        kernels = [self._kernel(group, name, option) for option in options]
        self.progress(f"tuning {name}: building {len(kernels)} kernels")
        with ThreadPoolExecutor(min(8, cpu_count() or 1)) as pool:
            usable = list(pool.map(_loads(self.device), kernels))
        reference = operator(kernels[0]).reference
        with torch.no_grad():
            aten = _seconds(lambda: reference(*operands))
            best, fastest = options[0], float("inf")
            tried = 0
            for option, kernel, fits in zip(options, kernels, usable, strict=True):
                if not fits or (tried and time.monotonic() - self.started > SECONDS):
                    continue
                tried += 1
                self.progress(f"tuning {name}: {tried} of {len(kernels)}")
                launch = operator(kernel).launch
                seconds = _seconds(lambda run=launch: run(*operands), most=4 * fastest)  # type: ignore[misc]
                if seconds < fastest:
                    best, fastest = option, seconds
        if not tried:
            return Decision(None, None, aten, 0)
        return Decision(best, fastest, aten, tried)


def _loads(device: torch.device) -> Callable[[Kernel], bool]:
    """Whether a kernel can be built for, and loaded on, `device`."""
    index = device.index if device.index is not None else torch.cuda.current_device()

    def loads(kernel: Kernel) -> bool:
        try:
            operator(kernel).launch.load(index)
        except (FusewrightError, RuntimeError):
            return False
        return True

    return loads


def _random(node: Node, hints: Mapping[Any, int], device: torch.device) -> Tensor:
    shape = sizes(node, hints)
    if not node.dtype.is_floating_point:
        return torch.ones(shape, dtype=node.dtype, device=device)
    if node.dtype.itemsize < 4:
        return torch.rand(shape, device=device).to(node.dtype)
    return torch.rand(shape, dtype=node.dtype, device=device)


def _seconds(call: Callable[[], Tensor], most: float = float("inf")) -> float:
    """The time of one call among several in a row, as the device sees it; not looked into when the first is slow."""
    call()
    torch.cuda.synchronize()
    once = _timed(call, 1)
    if once > most:
        return once
    count = max(3, min(50, int(0.01 / max(once, 1e-6))))
    return min(_timed(call, count) for _ in range(3))


def _timed(call: Callable[[], Tensor], count: int) -> float:
    event: Any = torch.cuda.Event
    start, stop = event(enable_timing=True), event(enable_timing=True)
    start.record()
    for _ in range(count):
        call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3 / count


def _read(path: Any) -> Decision | None:
    try:
        return Decision(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
