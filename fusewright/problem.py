"""Problem files: a `Model`, the arguments that build it and the arguments that call it, read from a user's Python file.

The format is the one this field's benchmarks share: ``class Model(nn.Module)``, ``get_inputs()`` and
``get_init_inputs()``, where either function returns a list (positional arguments) or a dict (keyword arguments).  A
candidate replaces `Model` by ``class ModelNew`` and takes its inputs from the reference.

Whatever goes wrong in the user's file becomes a `ProblemError` of one sentence that names the line in *their* file.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
import tokenize
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import nn

from fusewright.errors import FusewrightError, ProblemError
from fusewright.problem_batch import batch_edits
from fusewright.runtime.memory import available_bytes, is_out_of_memory
from fusewright.tree import tree_flatten, tree_map

Arguments: TypeAlias = tuple[Any, ...] | dict[str, Any]
"""What a function of a problem file returns: positional arguments, or keyword arguments."""

_load_counter = itertools.count()


def call(function: Callable[..., Any], arguments: Arguments) -> Any:
    """`function` called with positional or keyword arguments, whichever `arguments` holds."""
    return function(**arguments) if isinstance(arguments, dict) else function(*arguments)


@dataclass(frozen=True, eq=False)
class Problem:
    """One loaded problem file; building models and inputs runs the user's code under a seed of its own."""

    path: Path
    source: str
    module: ModuleType
    model_class: type[nn.Module]
    inputs_path: Path
    cut: int | None = None
    """Rows kept of every tensor input, where the file itself could not be asked for a smaller batch."""

    def init_inputs(self, seed: int = 0) -> Arguments:
        """The constructor's arguments; none where the file does not define ``get_init_inputs``.

        Raises `ProblemError` when the user's function fails or returns no list, tuple or dict.
        """
        function = getattr(self.module, "get_init_inputs", None)
        return () if function is None else self._ask("get_init_inputs", seed)

    def build(self, seed: int = 0, device: torch.device | str = "cpu") -> nn.Module:
        """A new model: the same weights for the same seed.

        Raises `ProblemError` when the arguments do not fit the constructor or the constructor fails.
        """
        arguments, name = self.init_inputs(seed), self.model_class.__name__
        self._check_arity(self.model_class, arguments, f"{name}()", "get_init_inputs()")
        with torch.random.fork_rng(devices=_cuda_devices()), guarded(self.path, f"{name}()"):
            torch.manual_seed(seed)
            model: nn.Module = call(self.model_class, arguments)
            return model.to(device)

    def inputs(self, seed: int = 0, device: torch.device | str = "cpu") -> Arguments:
        """The forward's arguments: the same values for the same seed, at this problem's batch.

        Raises `ProblemError` when the user's function fails, returns no list, tuple or dict, or cannot fit in memory.
        """
        self._check_memory()
        arguments = self._ask("get_inputs", seed)
        if self.cut is not None:
            arguments = _map_tensors(lambda x: _cut_rows(x, self.cut or 1), arguments)
        with guarded(self.inputs_path, "moving the inputs to the device"):
            return _map_tensors(lambda x: x.to(device), arguments)

    def placeholders(self) -> Arguments:
        """The forward's arguments for looking at alone: floating-point memory that was never touched, zeros elsewhere.

        Values of its own where the file cannot be asked without making them.
        """
        try:
            with torch.device("meta"):
                arguments = self._ask("get_inputs", seed=0)
        except ProblemError:
            return self.inputs()
        return _map_tensors(lambda x: _untouched(x) if x.is_meta else x, arguments)

    def try_forward(self, model: nn.Module, inputs: Arguments) -> Any:
        """The model's output, without gradients; shows the user's own mistakes before anything is optimised.

        Raises `ProblemError` when the inputs do not fit the forward or the forward fails.
        """
        self.check_inputs(model, inputs)
        with torch.no_grad(), guarded(self.path, f"{self.model_class.__name__}.forward()"):
            return call(model, inputs)

    def check_inputs(self, model: nn.Module, inputs: Arguments) -> None:
        """Raises `ProblemError` when the inputs are others than the forward takes."""
        self._check_arity(model.forward, inputs, f"{self.model_class.__name__}.forward()", "get_inputs()")

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of every tensor input, found without allocating them where the file allows it."""
        return tuple(tuple(x.shape) for x in self._sketch())

    def with_batch(self, size: int) -> Problem:
        """This problem with `size` as the leading size of every tensor input.

        The file itself is asked for that batch where it states one (`fusewright.problem_batch`); otherwise its inputs
        are generated whole and their leading rows taken, or repeated where there are too few.
        Raises `ProblemError` when `size` is not positive, when no input has a leading size, or when they disagree.
        """
        if size < 1:
            raise ProblemError(f"a batch of {size} is too small: --batch takes a positive number")
        shapes = self.shapes()
        leads = list(dict.fromkeys(shape[0] for shape in shapes if shape))
        if not leads:
            raise ProblemError(f"{self.inputs_path}: --batch needs a tensor input with at least one dimension")
        if leads == [size]:
            return self
        for edit in batch_edits(self.source, vars(self.module), leads[0], size):
            edited = self._try_edit(edit.tree)
            if edited is not None and edit.gives(shapes, edited.shapes()):
                return edited
        if len(leads) > 1:
            sizes = ", ".join(map(str, leads))
            raise ProblemError(
                f"{self.inputs_path}: the inputs have different leading sizes ({sizes}), so --batch cannot tell "
                "which is the batch; name it batch_size in the file"
            )
        return replace(self, cut=size)

    def _try_edit(self, tree: ast.Module) -> Problem | None:
        """A number that happens to equal the batch may break the file when it changes; such an edit is not taken."""
        try:
            module = _execute(self.inputs_path, tree)
            own = self.path == self.inputs_path
            model_class = _find_class(self.path, module, ("Model",)) if own else self.model_class
            edited = replace(self, module=module, model_class=model_class, cut=None)
            edited.shapes()
        except ProblemError:
            return None
        return edited

    def _ask(self, name: str, seed: int) -> Arguments:
        with torch.random.fork_rng(devices=_cuda_devices()), guarded(self.inputs_path, f"{name}()"):
            torch.manual_seed(seed)
            answer = getattr(self.module, name)()
        if isinstance(answer, dict) and all(isinstance(key, str) for key in answer):
            return answer
        if isinstance(answer, (list, tuple)):
            return tuple(answer)
        raise ProblemError(
            f"{self.inputs_path}: {name}() returned a {type(answer).__name__}; "
            "return a list of positional arguments or a dict of keyword arguments"
        )

    def _sketch(self) -> list[torch.Tensor]:
        """The tensor inputs on the meta device (shape and dtype, no storage), or as they are where that fails."""
        try:
            with torch.device("meta"):
                arguments = self._ask("get_inputs", seed=0)
        except ProblemError:
            arguments = self._ask("get_inputs", seed=0)
        return [x for x in tree_flatten(arguments)[0] if isinstance(x, torch.Tensor)]

    def _check_memory(self) -> None:
        """An operating system that overcommits kills the process instead of failing an allocation, so look first."""
        limit = available_bytes()
        if limit is None:
            return
        needed = sum(x.numel() * x.element_size() for x in self._sketch() if x.is_meta)
        if needed > limit:
            raise ProblemError(
                f"{self.inputs_path}: get_inputs() would need {needed / 1e9:.1f} GB and {limit / 1e9:.1f} GB are free; "
                "choose a smaller batch with --batch N"
            )

    def _check_arity(self, function: Callable[..., Any], arguments: Arguments, callee: str, giver: str) -> None:
        signature = inspect.signature(function)
        try:
            call(signature.bind, arguments)
        except TypeError as error:
            given = f"{len(arguments)} argument{'' if len(arguments) == 1 else 's'}"
            takes = f"({', '.join(signature.parameters)})"
            raise ProblemError(
                f"{self.path}: {callee} takes {takes} and {giver} gives {given}: {_first_line(error)}"
            ) from error


def load_problem(path: Path | str) -> Problem:
    """Loads a problem file.

    Raises `ProblemError` when the file cannot be read, parsed or executed, or lacks ``Model`` or ``get_inputs``.
    """
    path = Path(path)
    source = _read(path)
    module = _execute(path, _parse(path, source))
    model_class = _find_class(path, module, ("Model",))
    for name in ("get_inputs", "get_init_inputs"):
        if not callable(getattr(module, name, None)) and (name == "get_inputs" or hasattr(module, name)):
            raise ProblemError(f"{path} defines no function {name}(); it returns the arguments of Model's forward")
    return Problem(path, source, module, model_class, inputs_path=path)


def load_candidate(path: Path | str, reference: Problem) -> Problem:
    """Loads a candidate (``ModelNew``, or ``Model`` where there is none) that takes its inputs from `reference`.

    Raises `ProblemError` when the file cannot be read, parsed or executed, or defines neither class.
    """
    path = Path(path)
    module = _execute(path, _parse(path, _read(path)))
    return replace(reference, path=path, model_class=_find_class(path, module, ("ModelNew", "Model")))


@contextmanager
def guarded(path: Path, doing: str) -> Iterator[None]:
    """Turns what the user's code raises into a `ProblemError` that names the last line of `path` it passed through."""
    try:
        yield
    except FusewrightError:
        raise
    except (Exception, SystemExit) as error:
        raise ProblemError(_sentence(path, doing, error)) from error


def _sentence(path: Path, doing: str, error: BaseException) -> str:
    where = f"{path}{_line_in(path, error)}"
    if is_out_of_memory(error):
        return f"{where}: {doing} ran out of memory; choose a smaller batch with --batch N"
    if isinstance(error, SyntaxError):
        return f"{error.filename or path}:{error.lineno}: syntax error: {error.msg}"
    if isinstance(error, ImportError):
        return f"{where}: import failed: {_first_line(error)}"
    return f"{where}: {doing} raised {type(error).__name__}: {_first_line(error)}".removesuffix(": ")


def _line_in(path: Path, error: BaseException) -> str:
    own = str(path.resolve())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
    return f":{lines[-1]}" if lines else ""


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else ""


def _read(path: Path) -> str:
    try:
        with tokenize.open(path) as file:
            return file.read()
    except FileNotFoundError:
        raise ProblemError(f"{path}: no such file") from None
    except SyntaxError as error:
        raise ProblemError(f"{path}: not a Python source file: {error.msg}") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ProblemError(f"{path}: cannot be read: {reason}") from error


def _parse(path: Path, source: str) -> ast.Module:
    try:
        return ast.parse(source, filename=str(path))
    except SyntaxError as error:
        raise ProblemError(f"{path}:{error.lineno}: syntax error: {error.msg}") from error
    except ValueError as error:
        raise ProblemError(f"{path}: not a Python source file: {_first_line(error)}") from error


def _execute(path: Path, tree: ast.Module) -> ModuleType:
    """Runs a problem file as a module of its own; its neighbours can be imported, as when Python runs the file."""
    resolved = path.resolve()
    name = f"_fusewright_problem_{resolved.stem}_{next(_load_counter)}"
    module = ModuleType(name)
    module.__file__ = str(resolved)
    # Registered because pickle and dataclasses look a class up by its module's name.
    sys.modules[name] = module
    sys.path.insert(0, str(resolved.parent))
    try:
        with guarded(path, "loading the file"):
            exec(compile(tree, str(resolved), "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        if str(resolved.parent) in sys.path:
            sys.path.remove(str(resolved.parent))
    return module


def _find_class(path: Path, module: ModuleType, names: tuple[str, ...]) -> type[nn.Module]:
    for name in names:
        found = getattr(module, name, None)
        if inspect.isclass(found) and issubclass(found, nn.Module):
            return found
        if found is not None:
            raise ProblemError(f"{path}: {name} is no subclass of torch.nn.Module")
    others = [k for k, v in vars(module).items() if inspect.isclass(v) and v.__module__ == module.__name__]
    hint = f"; it defines {', '.join(others)}" if others else ""
    raise ProblemError(f"{path} defines no class {' or '.join(names)}{hint}")


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], arguments: Arguments) -> Arguments:
    mapped: Arguments = tree_map(lambda x: function(x) if isinstance(x, torch.Tensor) else x, arguments)
    return mapped


def _untouched(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    return made.requires_grad_(x.requires_grad) if x.is_floating_point() else made.zero_()


def _cut_rows(x: torch.Tensor, size: int) -> torch.Tensor:
    """`size` leading rows of `x`, repeated from the start where it has fewer; a copy, so the rest can be freed."""
    if x.dim() == 0 or x.shape[0] == 0:
        return x
    rows = x.detach()
    rows = rows[:size].clone() if size <= x.shape[0] else rows[torch.arange(size, device=x.device) % x.shape[0]]
    return rows.requires_grad_(x.requires_grad)


def _cuda_devices() -> list[int]:
    return list(range(torch.cuda.device_count()))
