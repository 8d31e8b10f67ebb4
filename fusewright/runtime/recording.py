"""Forwards as CUDA graphs: what a call launches is recorded once, and started again as a whole.

A host takes some ten microseconds for a launch, and a GPU often less for what is launched: a network of hundreds of
small kernels then waits for its host.  A replay is one launch.  It reads and writes where it was recorded, so that
inputs are copied in and results out.  Where the other tensors lie that it reads is looked at before; whatever else its
numbers hang on, such as how they lie there and how PyTorch is set to compute, while the GPU is at work, where it may go
ahead: a result that turns out to be another call's is dropped.

All recordings of a device are captured on one stream, and take turns: the workspaces that libraries keep for a stream
are all theirs, and lie in a pool of memory that lasts as long as the process.  What a recording computes on the way has
a pool of its own, which goes with it.

The driver is asked directly: a `torch.cuda.CUDAGraph` takes the device's generator of random numbers with it into its
capture, and whoever draws from it in another thread meanwhile is refused.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter, is_
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from fusewright.runtime.driver import cuda_driver
from fusewright.runtime.memory import no_garbage_collection
from fusewright.runtime.nvrtc import KernelError
from fusewright.tree import tree_flatten, tree_unflatten

# Recordings of a program at a time, and the share of a device's memory that they may hold.
MOST, MOST_HELD = 8, 1 / 32
# One that answered fewer calls before it had to go did not pay: the next is made after twice as many calls.
PAID = 32
# A recording that was not called for so many calls makes room.
OLD = 256
# Kinds of calls that are remembered for having come, or been refused.
REMEMBERED = 32

_torch: Any = torch  # some of what follows has no types
_pointer, _shape, _stride, _dtype = Tensor.data_ptr, attrgetter("shape"), Tensor.stride, attrgetter("dtype")
Forward = Callable[..., Any]


class Recorder:
    """Recordings of one program, by the kinds of its inputs; of inputs with up to so many elements."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.replays = 0
        self._recordings: dict[Hashable, Recording] = {}  # the one that was called last comes last
        self._waiting: dict[Hashable, tuple[Surroundings, int]] = {}
        self._patience: dict[Hashable, int] = {}
        self._refused: dict[Hashable, str] = {}
        self._calls = 0
        self._forgotten = False
        self._lock = threading.Lock()

    def replay(
        self, tensors: Sequence[Tensor], held: Held, derive: Callable[[], Sequence[Tensor]], *, ahead: bool
    ) -> tuple[Any, ...]:
        """What the program returns for these inputs, in a tuple; an empty one where it has to be called.

        `ahead`: a launch whose result is not wanted does no harm where it finds its memory.
        """
        if not self._recordings or not self._lock.acquire(blocking=False):
            return ()  # another thread is at it, for which this call need not wait
        try:
            self._catch_up()
            kind = _kind(tensors)
            recording = self._recordings.get(kind)
            if recording is None or torch.cuda.is_current_stream_capturing():
                return ()
            around = recording.around
            if not around.is_in_place(held) or not (ahead or around.is_unchanged(derive())):
                return ()
            answer = recording(tensors)
            if not answer or (ahead and not around.is_unchanged(derive())):
                return ()
            self.replays += 1
            self._calls += 1
            recording.last = self._calls
            self._recordings[kind] = self._recordings.pop(kind)
            return answer
        finally:
            self._release()

    def is_due(self, tensors: Sequence[Tensor], around: Callable[[], Surroundings]) -> bool:
        """Whether a call that was not replayed should be recorded once the program has been called: one of a kind that
        has come often enough."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._catch_up()
            kind = _kind(tensors)
            if kind in self._refused or sum(map(Tensor.numel, tensors)) > self.most:
                return False
            if torch.cuda.is_current_stream_capturing():
                return False
            now = around()
            recording = self._recordings.get(kind)
            if recording is not None and recording.around == now:
                return False  # it is there, and had no turn
            self._drop(kind)
            seen, calls = self._waiting.pop(kind, (now, 0))
            if seen == now and calls >= self._patience.get(kind, 1):
                return self._has_room()
            _remember(self._waiting, kind, (now, calls + 1 if seen == now else 1))
            return False
        finally:
            self._calls += 1
            self._release()

    def record(self, forward: Forward, module: Any, tensors: Sequence[Tensor], around: Surroundings) -> None:
        """Records ``forward(module, *tensors, *derived)``, which has just been called."""
        if not self._lock.acquire(blocking=False):
            return
        kind = _kind(tensors)
        try:
            self._catch_up()
            for other, old in list(self._recordings.items()):
                if old.around != around:
                    self._drop(other)
            self._waiting = {other: seen for other, seen in self._waiting.items() if seen[0] == around}
            made = Recording(forward, module, tensors, around)
            made.last = self._calls
            if (share := self.share + made.share) > MOST_HELD:
                _remember(self._refused, kind, f"recordings would hold {100 * share:.0f}% of the device's memory")
            else:
                self._recordings[kind] = made
        except BlockingIOError:  # another one has its turn, and so has this one some other time
            pass
        except torch.OutOfMemoryError:
            _remember(self._patience, kind, 2 * self._patience.get(kind, 1))
        except ValueError as error:
            _remember(self._refused, kind, str(error))
        except Exception as error:  # the call that is recorded has its result already
            _remember(self._refused, kind, f"{type(error).__name__}: {error}".partition("\n")[0])
        finally:
            self._release()

    def forget(self) -> None:
        """Keep nothing of a state that the module has left; whoever is at it does so, if this thread may not wait."""
        self._forgotten = True
        if self._lock.acquire(blocking=False):
            self._release()

    @property
    def share(self) -> float:
        """The part of their device's memory that recordings hold."""
        return sum(recording.share for recording in self._recordings.values())

    @property
    def reason(self) -> str:
        """Why something is not recorded, if anything."""
        return next(iter(self._refused.values()), "")

    @property
    def is_empty(self) -> bool:
        """Whether nothing is recorded at the moment."""
        return not self._recordings

    def _release(self) -> None:
        """Gives the lock back, with nothing left to be done that somebody could not wait for."""
        while True:
            self._catch_up()
            self._lock.release()
            if not self._forgotten or not self._lock.acquire(blocking=False):
                return

    def _catch_up(self) -> None:
        if self._forgotten:
            self._forgotten = False
            for kind in list(self._recordings):
                self._drop(kind)
            self._waiting.clear()
            self._refused.clear()

    def _drop(self, kind: Hashable) -> None:
        gone = self._recordings.pop(kind, None)
        if gone is not None:
            _remember(self._patience, kind, 1 if gone.calls >= PAID else 2 * self._patience.get(kind, 1))

    def _has_room(self) -> bool:
        if len(self._recordings) < MOST:
            return True
        first = next(iter(self._recordings))
        if self._calls - self._recordings[first].last < OLD:
            return False
        del self._recordings[first]
        return True


def _remember(of: dict[Hashable, Any], kind: Hashable, what: Any) -> None:
    """Keeps `what` of a kind of call, and no more kinds than are remembered."""
    of.pop(kind, None)
    while len(of) >= REMEMBERED:
        of.pop(next(iter(of)))
    of[kind] = what


def _kind(tensors: Sequence[Tensor]) -> Hashable:
    return tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)


class Held:
    """The tensors that a module holds, and those among them that a forward reads itself."""

    def __init__(self, tensors: Sequence[Tensor], read: Sequence[Tensor]) -> None:
        self.tensors, self.read = tuple(tensors), tuple(read)


NOTHING = Held((), ())


class Surroundings:
    """What a recording depends on beside its inputs: tensors derived from weights, those `held` by the module, and how
    PyTorch is set.  Keeps the tensors alive, but not the memory of those that are given another."""

    def __init__(self, derived: Sequence[Tensor], held: Held) -> None:
        self.derived, self.held = tuple(derived), held
        self._read = (*held.read, *derived)
        # Shapes and dtypes of parameters are part of the state that a module's `Watch` compares.
        self._others = tuple(t for t in held.read if not isinstance(t, nn.Parameter))
        self._places, self._layouts, self._settings = self._find(), self._look(), settings()

    def _find(self) -> list[int]:
        return list(map(_pointer, self._read))

    def _look(self) -> list[Any]:
        return [*map(_stride, self.held.read), *map(_shape, self._others), *map(_dtype, self._others)]

    def is_in_place(self, held: Held) -> bool:
        """Whether all memory that a launch reads is there."""
        same = held is self.held or all(map(is_, held.read, self.held.read))
        return same and self._find() == self._places

    def is_unchanged(self, derived: Sequence[Tensor]) -> bool:
        """Whether what is in place is what it was, and so are the derived tensors and PyTorch's settings."""
        same = derived is self.derived or all(map(is_, derived, self.derived))
        return same and self._look() == self._layouts and settings() == self._settings

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Surroundings) and self.is_in_place(other.held) and self.is_unchanged(other.derived)

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


class _Turns:
    """What the recordings of a device share: where they are captured, and whose turn it is."""

    def __init__(self, device: torch.device) -> None:
        # A stream of PyTorch's would be somebody else's as well, and with it what libraries keep for it.
        self.capturing = _torch.cuda.ExternalStream(cuda_driver().new_stream(device.index or 0), device=device)
        self.pool = _torch.cuda.MemPool()
        self.lock = threading.Lock()
        self.stream = self.capturing
        self.done = _torch.cuda.Event()


_devices: dict[torch.device, _Turns] = {}
_devices_lock = threading.RLock()  # a finalizer may want to record in the middle of it


_graphs: WeakSet[_Graph] = WeakSet()
_inherited: list[_Graph] = []


def _keep_inherited() -> None:
    """A process that was forked has no device of its own: what it has of the other's may not be given back there."""
    _inherited.extend(_graphs)


os.register_at_fork(after_in_child=_keep_inherited)


class _Graph:
    """What ``call()`` launches, captured, and its results; they and all on the way to them lie in a pool of its own.

    Raises `ValueError` where the caller's pool of memory is used instead, and what the call or the driver raise.
    """

    def __init__(self, call: Callable[[], Any], device: torch.device, turns: _Turns) -> None:
        self._pool, self._done, self._handle = _torch.cuda.MemPool(), turns.done, 0
        _graphs.add(self)
        self.leaves: list[Any] = []
        driver, stream = cuda_driver(), turns.capturing
        with torch.cuda.stream(stream):
            with _torch.cuda.use_mem_pool(self._pool, device):
                torch.empty(1, device=device)
            if not self.size:
                raise ValueError("the caller has a pool of memory in use")
            with _torch.cuda.use_mem_pool(turns.pool, device):
                # A library wants a handle for the thread, and a workspace, which somebody may have cleared since.
                small = torch.ones(8, 8, device=device)
                (small @ small).sum()
            torch.cuda.synchronize(device)
            # Nothing of other streams may be freed while a capture goes on.
            with no_garbage_collection(), _torch.cuda.use_mem_pool(self._pool, device):
                driver.begin_capture(stream.cuda_stream)
                try:
                    self.leaves, self.spec = tree_flatten(call())
                except BaseException:
                    with suppress(KernelError):  # it says once more that the capture has failed
                        self._handle = driver.end_capture(stream.cuda_stream)
                    raise
                self._handle = driver.end_capture(stream.cuda_stream)

    @property
    def size(self) -> int:
        """The bytes of its pool."""
        return sum(segment["total_size"] for segment in _torch.cuda.memory_snapshot(self._pool.id))

    def replay(self, stream: int) -> None:
        """Starts it on the stream with that handle."""
        cuda_driver().start_graph(self._handle, stream)

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        with cuda_driver().relaxed():  # memory is given back, whatever is captured meanwhile
            self._done.synchronize()
            if self._handle:
                cuda_driver().free_graph(self._handle)
            self.leaves.clear()
            del self._pool


class Recording:
    """One forward as a CUDA graph, for inputs of one kind; it has just been called, so that all it needs is there.

    Raises `ValueError` for what has to be called to be right, `BlockingIOError` where another one has its turn, and
    what the forward, PyTorch or the driver raise where it cannot be recorded.
    """

    def __init__(self, forward: Forward, module: Any, tensors: Sequence[Tensor], around: Surroundings) -> None:
        self.around, self.calls, self.last = around, 0, 0
        (device, *others) = dict.fromkeys(t.device for t in (*tensors, *around.derived, *around.held.tensors))
        if others or device.type != "cuda":
            raise ValueError(f"it reads what lies on {others[0] if others else device}")
        if not all(map(_is_dense, tensors)):
            raise ValueError("elements of an input lie apart, or share memory")
        with _devices_lock:
            self._turns = _devices.get(device) or _devices.setdefault(device, _Turns(device))
        if not self._turns.lock.acquire(blocking=False):
            raise BlockingIOError
        try:
            with torch.cuda.device(device), torch.inference_mode(False), torch.no_grad():
                self._inputs = [torch.empty_like(t).copy_(t) for t in tensors]
                call = partial(forward, module, *self._inputs, *around.derived)
                self._graph = _Graph(call, device, self._turns)
        finally:
            self._turns.lock.release()
        _require_own(self._graph.leaves, (*self._inputs, *around.derived, *around.held.tensors))
        held = self._graph.size + sum(t.nbytes for t in self._inputs)
        self.share = held / torch.cuda.get_device_properties(device).total_memory

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """The results for these inputs, on the current stream, in a tuple; an empty one where others have a turn."""
        turns = self._turns
        if not turns.lock.acquire(blocking=False):
            return ()
        try:
            stream = torch.cuda.current_stream(self._inputs[0].device)
            if stream != turns.stream:
                stream.wait_event(turns.done)
                turns.stream = stream
            try:
                for own, given in zip(self._inputs, tensors, strict=True):
                    own.record_stream(stream)
                    own.copy_(given)
                self._graph.replay(stream.cuda_stream)
                answer = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self._graph.leaves]
            finally:
                turns.done.record(stream)
        finally:
            turns.lock.release()
        self.calls += 1
        return (tree_unflatten(answer, self._graph.spec),)


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


def _is_dense(t: Tensor) -> bool:
    """Whether every element has a place of its own, and no gap is between them."""
    return torch.empty_like(t, device="meta").stride() == t.stride()
