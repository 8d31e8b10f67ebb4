"""Other ways to run a model, measured beside Fusewright: checked first, timed in one run, reported where they fail."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fusewright.errors import UnsupportedError
from fusewright.ir.types import main_device
from fusewright.measure import Sample, compare, environment, forward_call, training_call
from fusewright.tree import tree_flatten
from fusewright.verification.state import preserved, reseed

Build = Callable[[nn.Module, Any], nn.Module]

# What may be called an answer of the same model: lower precision passes, a wrong result does not.
_SAME_ANSWER = 1e-2


@dataclass(frozen=True)
class Peer:
    """One way to run a model.

    `build` takes the model and its example inputs and returns what runs it; it is called when the peer's turn comes.
    """

    name: str
    build: Build
    trains: bool = True
    needs: tuple[str, ...] = ()
    """Packages that must be installed."""


@dataclass(frozen=True)
class Row:
    """One peer's result; `reason` says in a sentence why what is missing is missing."""

    name: str
    forward: Sample | None = None
    ratio: float | None = None
    """Eager's forward median divided by this one: how many times as fast."""
    training: Sample | None = None
    training_ratio: float | None = None
    error: float | None = None
    """Largest difference from eager on the example, relative to the largest magnitude in eager's output."""
    reason: str = ""


@dataclass(frozen=True)
class Bench:
    """All rows of one model, and where they were measured."""

    model: str
    rows: tuple[Row, ...]
    environment: dict[str, Any]

    def record(self) -> dict[str, Any]:
        """The bench as plain data for a results file."""
        return {"model": self.model, "environment": self.environment, "rows": [asdict(row) for row in self.rows]}


def peers(names: Sequence[str]) -> tuple[Peer, ...]:
    """The named peers, none of them built yet.  Raises `UnsupportedError` for a name that is not in `PEERS`."""
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise UnsupportedError(f"no peer is called {', '.join(unknown)}; choose from {', '.join(PEERS)}")
    return tuple(PEERS[name] for name in names)


def bench(
    model: nn.Module,
    example_inputs: Any,
    names: Sequence[str] = ("eager", "compile"),
    *,
    include: Mapping[str, Build] | None = None,
    training: bool = False,
    rounds: int = 15,
    max_time: float = 60.0,
    progress: Callable[[str], None] | None = None,
) -> Bench:
    """Times the named peers, and what `include` builds (``{"fusewright": build}``), on one model in one run.

    The model runs in the mode it is in and is left as found.  Eager always takes part: each peer is compared with it
    before it is timed, and one that cannot be built, gives another answer or fails later becomes a row with the reason.
    `training` adds forward+backward times.  Timing takes up to `max_time` seconds for each of the two; building is not
    counted.  `progress` is told each peer's name.

    Raises `UnsupportedError` for an unknown name, and whatever the model itself raises on its own inputs.
    """
    wanted = ("eager", *(name for name in names if name != "eager"))
    entrants = (*peers(wanted), *(Peer(name, build) for name, build in (include or {}).items()))
    device = main_device(x.device for x in _tensors(example_inputs))
    report = progress or (lambda _: None)
    with preserved(model):
        expected = _answer(model, example_inputs)
        built: dict[str, nn.Module] = {}
        rows = {}
        for peer in entrants:
            report(peer.name)
            with preserved(model):  # an exporter may leave it in another mode
                rows[peer.name] = _admit(peer, model, example_inputs, expected, built)
        report("timing")
        forward = _timed(built, example_inputs, forward_call, device, rounds, max_time, rows)
        able = {peer.name: built[peer.name] for peer in entrants if training and peer.trains and peer.name in built}
        backward = _timed(able, example_inputs, training_call, device, rounds, max_time, rows)
    finished = tuple(_with_times(row, forward, backward) for row in rows.values())
    return Bench(type(model).__name__, finished, environment(device))


def _admit(peer: Peer, model: nn.Module, inputs: Any, expected: list[Tensor], built: dict[str, nn.Module]) -> Row:
    """Builds a peer and compares it with eager; only then does it join those to be timed."""
    missing = [package for package in peer.needs if importlib.util.find_spec(package) is None]
    if missing:
        return Row(peer.name, reason=f"{', '.join(missing)} is not installed")
    try:
        candidate = peer.build(model, inputs)
        error = _difference(expected, _answer(candidate, inputs))
    except Exception as failure:
        return Row(peer.name, reason=_sentence(failure))
    if not error <= _SAME_ANSWER:
        return Row(peer.name, error=error, reason=f"its answer differs from eager's by {error:.1e} of the scale")
    built[peer.name] = candidate
    return Row(peer.name, error=error)


def _timed(
    built: Mapping[str, nn.Module],
    inputs: Any,
    closure: Callable[[nn.Module, Any], Callable[[], object]],
    device: torch.device,
    rounds: int,
    max_time: float,
    rows: dict[str, Row],
) -> dict[str, Sample]:
    """Times all that survive one call each; the others' rows say why they did not."""
    calls = {}
    for name, module in built.items():
        try:
            call = closure(module, inputs)
            call()
        except Exception as failure:
            rows[name] = replace(rows[name], reason=_sentence(failure))
        else:
            calls[name] = call
    return compare(calls, device=device, rounds=rounds, max_time=max_time) if calls else {}


def _with_times(row: Row, forward: Mapping[str, Sample], backward: Mapping[str, Sample]) -> Row:
    def ratio(samples: Mapping[str, Sample]) -> float | None:
        if row.name not in samples or "eager" not in samples:
            return None
        return samples["eager"].median / samples[row.name].median

    return replace(
        row,
        forward=forward.get(row.name),
        ratio=ratio(forward),
        training=backward.get(row.name),
        training_ratio=ratio(backward),
    )


def _answer(module: nn.Module, inputs: Any) -> list[Tensor]:
    """The outputs on the example, random numbers being drawn from one seed."""
    reseed(0)
    outputs, _ = tree_flatten(forward_call(module, inputs)())
    return [x.detach().clone() for x in outputs if isinstance(x, Tensor)]


def _difference(expected: list[Tensor], given: list[Tensor]) -> float:
    """The largest difference relative to the largest magnitude of the same output; infinite where shapes differ."""
    if [x.shape for x in expected] != [x.shape for x in given]:
        return float("inf")
    worst = 0.0
    for a, b in zip(expected, given, strict=True):
        if a.numel() == 0:
            continue
        wide, other = a.to(torch.complex128), b.to(a.device, torch.complex128)
        unequal = ~torch.isclose(wide, other, rtol=0.0, atol=0.0, equal_nan=True)
        if bool(unequal.any()):
            size = float(wide.abs().max()) or 1.0
            gap = float((wide - other)[unequal].abs().max()) / size
            # Written so that a NaN counts as the worst.
            worst = worst if gap <= worst else gap
    return worst


def _tensors(inputs: Any) -> list[Tensor]:
    return [x for x in tree_flatten(inputs)[0] if isinstance(x, Tensor)]


def _sentence(failure: Exception) -> str:
    lines = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {lines[0][:200]}" if lines else type(failure).__name__


# -- the peers --------------------------------------------------------------------------------------------------------


def _eager(model: nn.Module, inputs: Any) -> nn.Module:
    return model


def _compiled(mode: str | None) -> Build:
    def build(model: nn.Module, inputs: Any) -> nn.Module:
        # A cache filled by an earlier model would make this one fall back to eager after eight recompilations.
        torch.compiler.reset()
        return torch.compile(model, mode=mode)  # type: ignore[return-value]

    return build


class _Session(nn.Module):
    """A runtime outside PyTorch that takes and gives arrays in order."""

    def __init__(self, run: Callable[[list[Any]], Sequence[Any]], signature: inspect.Signature) -> None:
        super().__init__()
        self._run = run
        self._signature = signature

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Every tensor argument goes in in order of the original forward's parameters; all outputs come back."""
        bound = self._signature.bind(*args, **kwargs)
        arrays = [x.detach().numpy() for x in _tensors((bound.args, bound.kwargs))]
        return [torch.from_numpy(array) for array in self._run(arrays)]


def _onnxruntime(model: nn.Module, inputs: Any) -> nn.Module:
    import onnxruntime

    _refuse_cuda(inputs)
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (_positional(inputs), {})
    program = torch.onnx.export(model, args, kwargs=kwargs, dynamo=True, verbose=False)
    assert program is not None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # Its threads wait in a loop between the operators of a call, and are not to do so during another peer's.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(
        program.model_proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [entry.name for entry in session.get_inputs()]
    return _Session(
        lambda arrays: session.run(None, dict(zip(names, arrays, strict=True))), inspect.signature(model.forward)
    )


def _openvino(model: nn.Module, inputs: Any) -> nn.Module:
    import openvino

    _refuse_cuda(inputs)
    example = dict(inputs) if isinstance(inputs, Mapping) else _positional(inputs)
    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.compile_model(openvino.convert_model(model, example_input=example), "CPU", settings)
    return _Session(lambda arrays: list(compiled(arrays).values()), inspect.signature(model.forward))


def _refuse_cuda(inputs: Any) -> None:
    if any(x.is_cuda for x in _tensors(inputs)):
        raise UnsupportedError("this peer is measured on the CPU only")


def _positional(inputs: Any) -> tuple[Any, ...]:
    return (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)


PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("eager", _eager),
        Peer("compile", _compiled(None)),
        Peer("compile-max", _compiled("max-autotune")),
        Peer("onnxruntime", _onnxruntime, trains=False, needs=("onnxruntime", "onnxscript")),
        Peer("openvino", _openvino, trains=False, needs=("openvino",)),
    )
}
"""Every peer by name, in the order of a table."""
