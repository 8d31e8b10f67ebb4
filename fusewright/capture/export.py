"""The call of `torch.export`, and what its result says about inputs, outputs, parameters and constants."""

from __future__ import annotations

import io
import logging
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import config

from fusewright.capture.mapped import unmapped
from fusewright.capture.regions import inlined
from fusewright.capture.state import untouched
from fusewright.capture.symbols import STATIC, NotSymbolicError, Symbols, read_symbols
from fusewright.errors import CaptureError
from fusewright.ir import ops
from fusewright.ir.node import Node, make
from fusewright.tree import TreeSpec, tree_flatten, tree_unflatten

# Names that the text of a program uses for itself.
_RESERVED = frozenset({"self", "torch", "F", "constants", "float"})


@dataclass(frozen=True)
class Exported:
    """A traced forward with its sources as nodes.

    sources    what each placeholder of the trace stands for: a node, or the value of an input that is no tensor
    outputs    the flat outputs: calls or placeholders of the trace, or plain values
    positions  where the tensor inputs are among the flat arguments; `fixed` holds the other arguments by position
    """

    model: str
    graph: fx.Graph
    sources: Mapping[fx.Node, Any]
    inputs: tuple[Node, ...]
    outputs: tuple[Any, ...]
    symbols: Symbols
    constants: Mapping[str, torch.Tensor]
    in_spec: TreeSpec
    out_spec: TreeSpec
    positions: tuple[int, ...]
    fixed: Mapping[int, Any]


def trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, dynamic: bool) -> Exported:
    """Trace `model` on the example arguments; raises `CaptureError` or `NotSymbolicError`."""
    name = type(model).__name__
    flat, in_spec = tree_flatten((args, kwargs))
    _check_tensors(name, model, flat)
    flat = _distinct(flat)
    args, kwargs = tree_unflatten(flat, in_spec)
    program = _export(name, model, args, kwargs, _batched(flat) if dynamic else [])
    return _read(name, program, flat, in_spec)


def _distinct(flat: list[Any]) -> list[Any]:
    """The same arguments, each tensor once: a trace would take one that is given twice for one argument."""
    found: list[Any] = []
    for value in flat:
        again = isinstance(value, torch.Tensor) and any(value is other for other in found)
        found.append(value.detach().requires_grad_(value.requires_grad) if again else value)
    return found


def _batched(flat: list[Any]) -> list[torch.Tensor]:
    """The inputs that carry the batch: those whose leading size is that of most, if that is at least 2."""
    tensors = [t for t in flat if isinstance(t, torch.Tensor) and t.ndim > 0]
    leading = [t.shape[0] for t in tensors]
    if not leading:
        return []
    batch = max(leading, key=leading.count)  # the first of equally frequent ones
    return [t for t in tensors if t.shape[0] == batch and batch >= 2]


def _export(
    name: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batched: list[torch.Tensor]
) -> ExportedProgram:
    shapes = ShapesCollection()  # type: ignore[no-untyped-call]
    for tensor in batched:
        shapes[tensor] = {0: Dim.AUTO}
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    with _quiet(), untouched(model, devices), _plain_modes(devices):
        try:
            return torch.export.export(
                model,
                args,
                kwargs,
                dynamic_shapes=shapes if batched else None,  # type: ignore[arg-type]  # documented, not annotated
                strict=False,
            )
        except Exception as error:
            if batched:
                raise NotSymbolicError(_cause(error)) from error
            raise _refusal(name, _cause(error)) from error


@contextmanager
def _plain_modes(devices: set[torch.device]) -> Iterator[None]:
    """Gradients on and autocast off, whatever surrounds the call: the graph must serve every mode."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in {d.type for d in devices} | {"cpu"}:
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the tracer's own messages: what it cannot do is reported by us, in one sentence.

    Nor does it look up where in Python every call and every size came from, which nobody would read: the records of
    `TORCH_TRACE`, which it writes for as long as that has a handler, and stacks of nodes.
    """
    disabled = logging.root.manager.disable
    records = logging.getLogger("torch.__trace").handlers
    handlers = records[:]
    without_stacks = getattr(config, "do_not_emit_stack_traces", False)  # younger than our oldest PyTorch
    logging.disable(logging.CRITICAL)
    records.clear()
    config.do_not_emit_stack_traces = True
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        config.do_not_emit_stack_traces = without_stacks
        records[:] = handlers
        logging.disable(disabled)


def _cause(error: Exception) -> str:
    """The reason in words of ours, where it is a known one."""
    text = f"{type(error).__name__}: {error}"
    known = {
        "data-dependent": "its control flow depends on values of tensors (use torch.where, or a fixed number of steps)",
        "DataDependent": "its control flow depends on values of tensors (use torch.where, or a fixed number of steps)",
        "non-fake": "it computes with a tensor that is neither input, parameter, buffer nor attribute",
        "output type": "it returns something that is neither a tensor nor a plain Python value",
        "pytree": "it takes or returns a container that PyTorch does not know (use dicts, lists and tuples)",
    }
    averaging = next(_averaging(error), None)
    if averaging is not None:
        return f"its {averaging} with momentum=None counts batches to average over them (give it a momentum, or eval())"
    for sign, reason in known.items():
        if sign in text:
            return reason
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"torch.export refused it ({type(error).__name__}: {first.rstrip('.')[:200]})"


def _averaging(error: Exception) -> Iterator[str]:
    """The kinds of norms that were running when `error` was raised, and read their counters."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.training and module.momentum is None:
            yield type(module).__name__


def _refusal(name: str, cause: str) -> CaptureError:
    return CaptureError(f"{name} cannot be captured: {cause}; it runs as it did.")


def _check_tensors(name: str, model: nn.Module, flat: list[Any]) -> None:
    state = [*model.named_parameters(), *model.named_buffers()]
    inputs = [(f"input {i}", t) for i, t in enumerate(flat) if isinstance(t, torch.Tensor)]
    for label, tensor in [*state, *inputs]:
        if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise CaptureError(f"{name} cannot be captured: {label} has no shape yet; call the model once first.")
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            kind = type(tensor).__name__
            raise CaptureError(
                f"{name} cannot be captured: {label} is a {kind}, not a plain tensor; it runs as it did."
            )
        if tensor.layout is not torch.strided or tensor.is_quantized:
            what = "quantised" if tensor.is_quantized else str(tensor.layout)
            raise CaptureError(
                f"{name} cannot be captured: {label} is {what}; only dense tensors can; it runs as it did."
            )


def _read(name: str, program: ExportedProgram, flat: list[Any], in_spec: TreeSpec) -> Exported:
    graph = unmapped(inlined(name, program), program.graph_module)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    specs = program.graph_signature.input_specs
    user = [n for n, s in zip(placeholders, specs, strict=True) if s.kind is InputKind.USER_INPUT]
    if len(user) != len(flat):
        raise CaptureError(
            f"{name} cannot be captured: its {len(flat)} arguments became {len(user)}; it runs as it did."
        )
    positions = tuple(i for i, value in enumerate(flat) if isinstance(value, torch.Tensor))
    tensors = [user[i] for i in positions]
    names = _names(tensors)
    shown = [flat[i] for i in positions]
    symbols = read_symbols(program, [n.meta["val"] for n in tensors], shown, names) if tensors else STATIC
    inputs = tuple(
        make(ops.Input(*_type(symbols, node), name=label, index=i))
        for i, (node, label) in enumerate(zip(tensors, names, strict=True))
    )
    sources: dict[fx.Node, Any] = dict(zip(tensors, inputs, strict=True))
    sources |= {user[i]: value for i, value in enumerate(flat) if i not in positions}
    for node, spec in zip(placeholders, specs, strict=True):
        if spec.kind is not InputKind.USER_INPUT:
            sources[node] = _state(name, program, symbols, node, spec)
    fixed = {i: value for i, value in enumerate(flat) if i not in positions}
    constants = {op.key: program.constants[op.key] for op in _constants(sources)}
    out_spec: TreeSpec | None = program.call_spec.out_spec
    assert out_spec is not None
    outputs = _outputs(name, program, graph)
    return Exported(name, graph, sources, inputs, outputs, symbols, constants, in_spec, out_spec, positions, fixed)


def _constants(sources: Mapping[fx.Node, Any]) -> list[ops.Constant]:
    return [v.op for v in sources.values() if isinstance(v, Node) and isinstance(v.op, ops.Constant)]


def _names(tensors: list[fx.Node]) -> list[str]:
    """The inputs' names; `_` is added to those that a program uses otherwise."""
    return [n.name + "_" if n.name in _RESERVED or not n.name.isidentifier() else n.name for n in tensors]


def _type(symbols: Symbols, node: fx.Node) -> tuple[tuple[ops.Size, ...], torch.dtype, torch.device]:
    value = node.meta["val"]
    return symbols.shape(value.shape), value.dtype, value.device


def _state(name: str, program: ExportedProgram, symbols: Symbols, node: fx.Node, spec: Any) -> Node:
    """The node for a parameter, a buffer or a constant tensor."""
    kinds = {InputKind.PARAMETER: ops.Param, InputKind.BUFFER: ops.Buffer}
    if spec.kind in kinds:
        return make(kinds[spec.kind](*_type(symbols, node), path=spec.target))
    if spec.kind is InputKind.CONSTANT_TENSOR and isinstance(program.constants.get(spec.target), torch.Tensor):
        return make(ops.Constant(*_type(symbols, node), key=spec.target))
    raise _refusal(name, f"it holds {spec.target}, which is no tensor")


def _outputs(name: str, program: ExportedProgram, graph: fx.Graph) -> tuple[Any, ...]:
    specs = program.graph_signature.output_specs
    if any(s.kind is not OutputKind.USER_OUTPUT for s in specs):
        raise _refusal(name, "it has results beside its outputs")
    output = next(n for n in graph.nodes if n.op == "output")
    values = output.args[0]
    assert isinstance(values, tuple | list)
    for value in values:
        plain = value is None or isinstance(value, fx.Node | bool | int | float | str)
        if not plain:
            raise _refusal(name, f"it returns a {type(value).__name__}")
    return tuple(values)
