"""Forwards as CUDA graphs: what a call launches is recorded once, and started again as a whole.

A host takes some ten microseconds for a launch, and a GPU often less for what is launched: a network of hundreds of
small kernels then waits for its host.  A replay is one launch.  It reads and writes where it was recorded, so that
inputs are copied in and results out; whatever else its numbers hang on is looked at before: where the tensors it reads
lie, and how PyTorch was set to compute.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import is_
from typing import Any

import torch
from torch import Tensor

from fusewright.tree import tree_flatten, tree_unflatten

# Recordings of a program at a time: each holds the memory of a call.
MOST = 8
# One that answered fewer calls before it had to go did not pay: the next is made after twice as many calls.
PAID = 32

_torch: Any = torch  # some of what follows has no types
_pointer = Tensor.data_ptr
Forward = Callable[..., Any]
# A matmul's workspace belongs to a stream, and goes on to whoever uses that next: a recording needs its own.  Only a
# private function gives them up; where it is gone, nothing is recorded.
_free_workspaces: Callable[[], None] | None = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)


class Recorder:
    """Recordings of one program, by the kinds of its inputs."""

    def __init__(self) -> None:
        self.replays = 0
        self.reason = ""  # why some kind of call cannot be recorded
        self._recordings: dict[Hashable, Recording] = {}
        self._waiting: dict[Hashable, tuple[_Surroundings, int]] = {}
        self._patience: dict[Hashable, int] = {}
        self._refused: set[Hashable] = set()
        self._lock = threading.Lock()

    def replay(
        self, forward: Forward, module: Any, tensors: Sequence[Tensor], derived: Sequence[Tensor], held: list[Tensor]
    ) -> tuple[Any, ...]:
        """What ``forward(module, *tensors, *derived)`` returns, in a tuple; an empty one where that has to be called.

        All are ordinary tensors, in a call without gradients; `held` are those that the program may read beside them.
        The first calls of a kind are left to the program.
        """
        if not self._lock.acquire(blocking=False):  # another thread is at it, for which this call need not wait
            return ()
        try:
            if torch.cuda.is_current_stream_capturing():
                return ()
            kind = tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)
            around = _Surroundings(derived, held)
            recording = self._recordings.get(kind)
            if recording is None or recording.around != around:
                recording = self._recorded(kind, around, forward, module, tensors)
            if recording is None:
                return ()
            self.replays += 1
            return (recording(tensors),)
        finally:
            self._lock.release()

    def _recorded(
        self, kind: Hashable, around: _Surroundings, forward: Forward, module: Any, tensors: Sequence[Tensor]
    ) -> Recording | None:
        """A recording of a kind of call that has come often enough."""
        self._drop(kind)
        if kind in self._refused or len(self._refused) >= MOST:
            return None
        seen, calls = self._waiting.get(kind, (around, 0))
        if seen != around:
            calls = 0
        if calls < self._patience.get(kind, 1):
            if kind in self._waiting or len(self._waiting) < 4 * MOST:
                self._waiting[kind] = around, calls + 1
            return None
        if len(self._recordings) >= MOST:
            return None
        try:
            made = Recording(forward, module, tensors, around)
        except (RuntimeError, ValueError) as error:  # some of what PyTorch launches cannot be recorded
            self.reason = str(error).partition("\n")[0]
            self._refused.add(kind)
            return None
        self._recordings[kind] = made
        return made

    def _drop(self, kind: Hashable) -> None:
        gone = self._recordings.pop(kind, None)
        if gone is not None:
            self._patience[kind] = 1 if gone.calls >= PAID else 2 * self._patience.get(kind, 1)

    def forget(self) -> None:
        """Keep nothing of a state that the module has left."""
        with self._lock:
            for kind in list(self._recordings):
                self._drop(kind)
            self._waiting.clear()

    @property
    def bytes(self) -> int:
        """Memory that recordings hold on their device."""
        return sum(recording.bytes for recording in self._recordings.values())


class _Surroundings:
    """What a recording depends on beside its inputs; keeps these tensors alive."""

    def __init__(self, derived: Sequence[Tensor], held: list[Tensor]) -> None:
        self.derived, self.held = tuple(derived), held
        self.pointers, self.settings = list(map(_pointer, held)), settings()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Surroundings) or self.pointers != other.pointers or self.settings != other.settings:
            return False
        same = self.held is other.held or all(map(is_, self.held, other.held))
        return same and len(self.derived) == len(other.derived) and all(map(is_, self.derived, other.derived))

    __hash__ = None  # type: ignore[assignment]


def settings() -> tuple[Any, ...]:
    """What PyTorch's operations on a GPU go by, beside their operands."""
    backends = _torch.backends
    cudnn, products, cuda = backends.cudnn, backends.cuda.matmul, backends.cuda
    return (
        *(cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision),
        *(backends.fp32_precision, products.fp32_precision, products.allow_fp16_accumulation),
        *(products.allow_fp16_reduced_precision_reduction, products.allow_bf16_reduced_precision_reduction),
        *(cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
        *(cuda.cudnn_sdp_enabled(), torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()),
    )


class Recording:
    """One forward as a CUDA graph, for inputs of one kind.

    Raises `ValueError` for what has to be called to be right, and `RuntimeError` where PyTorch cannot record it.
    """

    def __init__(self, forward: Forward, module: Any, tensors: Sequence[Tensor], around: _Surroundings) -> None:
        self.around, self.calls = around, 0
        (device, *others) = dict.fromkeys(t.device for t in (*tensors, *around.derived, *around.held))
        if others or device.type != "cuda":
            raise ValueError(f"it reads what lies on {others[0] if others else device}")
        if not all(map(_is_dense, tensors)):
            raise ValueError("elements of an input lie apart, or share memory")
        if _free_workspaces is None:
            raise ValueError("this version of PyTorch does not give up workspaces")
        current, side = torch.cuda.current_stream(device), _torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.inference_mode(False), torch.no_grad():
            self._inputs = [torch.empty_like(t).copy_(t) for t in tensors]
            side.wait_stream(current)
            with torch.cuda.stream(side), _no_garbage_collection():
                forward(module, *self._inputs, *around.derived)  # loads kernels, and lets libraries choose
                torch.cuda.synchronize(device)
                before = torch.cuda.memory_reserved(device)
                self._graph = torch.cuda.CUDAGraph()
                answer = _captured(self._graph, lambda: forward(module, *self._inputs, *around.derived))
            self.bytes = torch.cuda.memory_reserved(device) - before
            self._done, self._stream = _torch.cuda.Event(), current
            self._done.record(current)
        self._leaves, self._spec = tree_flatten(answer)
        _require_own(self._leaves, (*self._inputs, *around.derived, *around.held))

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """The results for these inputs, on the current stream."""
        self.calls += 1
        stream = torch.cuda.current_stream(self._inputs[0].device)
        if stream != self._stream:
            stream.wait_event(self._done)
            for own in self._inputs:
                own.record_stream(stream)
            self._stream = stream
        for own, given in zip(self._inputs, tensors, strict=True):
            own.copy_(given)
        self._graph.replay()
        answer = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        self._done.record(stream)
        return tree_unflatten(answer, self._spec)


def _require_own(leaves: Sequence[Any], read: Sequence[Tensor]) -> None:
    """Results are copied, which only memory of their own stands."""
    places = [t.untyped_storage().data_ptr() for t in read]
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.numel() == 0:
            continue
        if not _is_dense(leaf) or leaf.device != read[0].device:
            raise ValueError("elements of a result lie apart, or elsewhere")
        if (place := leaf.untyped_storage().data_ptr()) in places:
            raise ValueError("a result shares memory with another tensor")
        places.append(place)


def _captured(graph: Any, call: Callable[[], Any]) -> Any:
    """What `call` returns, whose launches `graph` then holds with the memory they need."""
    assert _free_workspaces is not None
    _free_workspaces()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        answer = call()
    except BaseException:
        with suppress(RuntimeError):  # it says once more that the capture has failed
            graph.capture_end()
        raise
    graph.capture_end()
    _free_workspaces()
    return answer


def _is_dense(t: Tensor) -> bool:
    """Whether every element has a place of its own, and no gap is between them."""
    return torch.empty_like(t, device="meta").stride() == t.stride()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Nothing of other streams may be freed while a capture goes on."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
