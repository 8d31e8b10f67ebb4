"""The parts of a solution file that are the same in every one; ``$name`` stands for what differs."""

CUDA_LIBRARY = '''
@cache
def $library(device: int) -> ctypes.CDLL:
    """The kernels for a device, built when first used.

    Plain C functions, called through ctypes: compiling PyTorch's C++ headers would take most of a minute.
    """
    arch = $arch
    path = load_inline(
        name=f"${extension}_sm_{arch}",
        cpp_sources="",
        cuda_sources=[$sources],
        extra_cuda_cflags=[f"-gencode=arch=compute_{arch},code=sm_{arch}", "-std=c++17"],
        no_implicit_headers=True,
        is_python_module=False,
    )
    kernels = ctypes.CDLL(path)
    $declarations
    return kernels


def check(kernel: str, error: bytes | None) -> None:
    """Raises `RuntimeError` where CUDA refused to launch a kernel."""
    if error is not None:
        raise RuntimeError(f"{kernel} could not be launched: {error.decode()}")
'''

CPU_LIBRARY = '''
@cache
def $library() -> ctypes.CDLL:
    """The kernels, built for this machine's processor when first used.

    Plain C functions, called through ctypes.  Compiled with OpenMP and linked without, so that PyTorch's threads serve.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    wide = ["$wide"] if capability == "AVX512" else []
    path = load_inline(
        name=f"${extension}_{capability}",
        cpp_sources=[$sources],
        extra_cflags=[$flags, *wide],
        no_implicit_headers=True,
        is_python_module=False,
    )
    kernels = ctypes.CDLL(path)
    $declarations
    return kernels
'''

FAILURE = """
// What CUDA says about an error, nothing where there is none.
static const char* failure(cudaError_t error) {
    if (error == cudaSuccess) return nullptr;
    cudaGetLastError();  // or somebody's next launch would be blamed for it
    return cudaGetErrorString(error);
}

// Whether launches of the current device may begin while the ones before them end; kernels wait for what they read.
static bool overlaps() {
    int device = 0, major = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    return major == 9;  // where it was tried
}

template <class... Parameters, class... Arguments>
static cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, int threads, int shared, cudaStream_t stream,
                          Arguments... arguments) {
    static const bool early = overlaps();
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t configuration = {};
    configuration.gridDim = grid;
    configuration.blockDim = dim3(threads);
    configuration.dynamicSmemBytes = shared;
    configuration.stream = stream;
    configuration.attrs = &attribute;
    configuration.numAttrs = early ? 1 : 0;
    return cudaLaunchKernelEx(&configuration, kernel, Parameters(arguments)...);
}
"""

OPERANDS = '''
def expect(kernel: str, name: str, shape: torch.Size, wanted: tuple[int | None, ...]) -> None:
    """Raises `ValueError` for an operand of a shape that the kernel was not made for; `None` stands for any length."""
    if len(shape) != len(wanted) or any(n not in (None, m) for m, n in zip(shape, wanted, strict=True)):
        lengths = ", ".join("any" if n is None else str(n) for n in wanted)
        raise ValueError(f"{kernel} takes {name} of shape ({lengths}), not {tuple(shape)}")


def dense(
    kernel: str,
    name: str,
    tensor: torch.Tensor,
    $parameter
    dtype: torch.dtype,
    layout: torch.memory_format = torch.contiguous_format,
) -> torch.Tensor:
    """An operand as kernels read it: without gaps, beginning at a multiple of $multiple.

    Raises `ValueError` for one of another device or dtype than the kernel was made for.
    """
    if $elsewhere or tensor.dtype is not dtype:
        raise ValueError(f"{kernel} takes {name} as {dtype} on $device, not as {tensor.dtype} on {tensor.device}")
    alignment = $alignment
    if tensor.is_contiguous(memory_format=layout) and tensor.data_ptr() % alignment == 0 and not tensor.is_neg():
        return tensor
    return tensor.resolve_neg().clone(memory_format=layout)
'''

ARGUMENTS = '''
def expect_arguments(function, given: tuple, wanted: tuple) -> None:
    """Raises `ValueError` where a kernel's function has other last arguments than its kernel was made for."""
    if given != wanted:
        names = [*inspect.signature(function).parameters][-len(wanted) :]
        name, one, other = next(each for each in zip(names, wanted, given, strict=True) if each[1] != each[2])
        remedy = "`fusewright optimize` writes a file for another model"
        raise ValueError(f"{function.__name__} was made for {name}={one}, not {other}; {remedy}")
'''

GRADIENTS = '''
class Recomputed(torch.autograd.Function):
    """A kernel whose backward computes its reference again and differentiates that, so that nothing is kept."""

    @staticmethod
    def forward(launch, reference, *operands):
        """Runs the kernel."""
        return launch(*operands)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keeps the operands, and nothing that was computed from them."""
        _, ctx.reference, *operands = inputs
        ctx.save_for_backward(*operands)

    @staticmethod
    def backward(ctx, $grads):
        """The gradients of the operands that need one."""
        again = torch.is_grad_enabled()
        needed = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            # Views, so that no gradient flows from one operand to another that it was computed from; with all their
            # strides: ATen's gradient of a batch norm is wrong on a CPU where those of a size of 1 are others.
            operands = [torch.ops.aten.alias(operand) for operand in ctx.saved_tensors]
            $values = ctx.reference(*operands)
        $differentiable
        if not $any:  # a step function, say
            return (None,) * (2 + len(operands))
        wanted = [operand for operand, need in zip(operands, needed, strict=True) if need]
        $given
        found = iter(torch.autograd.grad($values, wanted, $own, create_graph=again, allow_unused=True))
        return None, None, *(next(found) if need else None for need in needed)


def differentiable(launch, reference, *operands: torch.Tensor) -> $returned:
    """`launch(*operands)`, through which gradients flow as through `reference(*operands)`."""
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        return Recomputed.apply(launch, reference, *operands)
    return launch(*operands)
'''

# How gradients are found of kernels that return a tensor, and of such as may return several.
OF_ONE: dict[str, object] = {
    "grads": "grad",
    "values": "value",
    "differentiable": [],
    "any": "value.requires_grad",
    "given": [],
    "own": "grad",
    "returned": "torch.Tensor",
}
OF_SEVERAL: dict[str, object] = {
    "grads": "*grads",
    "values": "values",
    "differentiable": [
        "values = (values,) if isinstance(values, torch.Tensor) else values",
        "given = [(value, grad) for value, grad in zip(values, grads, strict=True) if value.requires_grad]",
    ],
    "any": "given",
    "given": ["values, grads = zip(*given, strict=True)"],
    "own": "grads",
    "returned": "torch.Tensor | tuple[torch.Tensor, ...]",
}

TF32 = '''
def tf32_allowed() -> bool:
    """Whether PyTorch's settings let float32 $operations round their operands to tf32, as the kernels do."""
    own = torch.backends.$setting.fp32_precision
    return (torch.backends.fp32_precision if own == "none" else own) == "tf32"
'''

DERIVED = '''
KEPT = WeakKeyDictionary()  # for each model: its weights when something was last derived from them, and what


def derived(derive, *sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`derive()`, a method that reads these weights alone: kept while none changes and no gradient flows through."""
    model, now, trains = derive.__self__, [], torch.is_grad_enabled()
    for source in sources:
        if source.is_inference() or (trains and source.requires_grad):
            return derive()
        now.append((id(source), source._version, source.data_ptr()))
    kept = KEPT.get(model)
    if kept is None or kept[0] != now:
        with torch.inference_mode(False), torch.no_grad():
            kept = KEPT[model] = now, derive(), sources  # the weights too, so that nothing else gets their ids
    return kept[1]
'''

# Of a private function there may be none.
STREAM = '''
def public_stream(device: int) -> int:
    """The current stream of a device."""
    return torch.cuda.current_stream(device).cuda_stream


# The same without an object for it, as what PyTorch generates itself asks.
raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", public_stream)
'''

LIBRARIES = {"cuda": CUDA_LIBRARY, "cpu": CPU_LIBRARY}

# For a model of plain values that cannot change by themselves: it changes where a module gets another object.
PLAIN_CONFIGURATION = '''
# Parameters, submodules, hooks and mode, and what torch.compile leaves with a module that it is given.
OF_ALL_MODULES = frozenset(vars(torch.nn.Module())) | {"_is_torch_compile"}
CONTAINERS = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def tensor_names(module: torch.nn.Module) -> tuple[str, ...]:
    """The parameters and buffers that a module has."""
    return tuple(n for n, t in (*module._parameters.items(), *module._buffers.items()) if t is not None)


def configuration(module: torch.nn.Module) -> dict:
    """What a forward may depend on besides tensors: what somebody gave a module, and the like of its submodules."""
    hides = type(module).__module__.startswith("torch.")  # what its private attributes hold follows from the others
    own = {n: value for n, value in vars(module).items() if n not in OF_ALL_MODULES and not (hides and n[0] == "_")}
    parts = {n: part if part is None else (named(part), configuration(part)) for n, part in module._modules.items()}
    return {"parameters and buffers": tensor_names(module), **own, **parts}


def named(module: torch.nn.Module) -> str:
    """A module's class by its name and package; those of this file have none."""
    kind = type(module)
    package = kind.__module__.partition(".")[0]
    return kind.__qualname__ if kind.__module__ == Model.__module__ else f"{package}.{kind.__qualname__}"


def views(model: Model) -> list:
    """Live views of all that a model consists of: where that changes, another object appears in one of them."""
    return [
        held.values()
        for own in map(vars, model.modules())
        for held in (own, *(own[name] for name in (*CONTAINERS, *HOOKS)))
    ]
'''

# For one that holds containers, objects or functions.
CONFIGURATION = '''
# Parameters, submodules, hooks and mode, and what torch.compile leaves with a module that it is given.
OF_ALL_MODULES = frozenset(vars(torch.nn.Module())) | {"_is_torch_compile"}
CONTAINERS = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def held(value):
    """What a module, container, object or function consists of, live where it may change; `None` for anything else."""
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return value
    if hasattr(value, "tolist") and not isinstance(value, torch.Tensor):  # an array
        return (value.tolist(),)
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, FunctionType):
        cells = (cell.cell_contents for cell in value.__closure__ or ())
        return *cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()
    return None if isinstance(value, (type, ModuleType, Logger, torch.Tensor)) else getattr(value, "__dict__", None)


def tensor_names(module: torch.nn.Module) -> tuple[str, ...]:
    """The parameters and buffers that a module has."""
    return tuple(n for n, t in (*module._parameters.items(), *module._buffers.items()) if t is not None)


def given(module: torch.nn.Module) -> dict:
    """What somebody gave a module; what PyTorch's own modules keep to themselves follows from the rest."""
    hides = type(module).__module__.startswith("torch.")
    own = {n: part for n, part in vars(module).items() if n not in OF_ALL_MODULES and not (hides and n[0] == "_")}
    return {"parameters and buffers": tensor_names(module), **own, **module._modules}


def described(value, above=()):
    """A plain value as it is, anything else by its name and what it holds, but for what it is held by."""
    if type(value) in (bool, int, str, type(None)) or (type(value) is float and isfinite(value)):
        return value
    if isinstance(value, Model) and above:
        return "Model"
    parts = given(value) if isinstance(value, torch.nn.Module) else held(value)
    above = (*above, id(value))
    if parts is None:
        by_name = hasattr(value, "__qualname__") or isinstance(value, (Logger, torch.Tensor))
        return value.__name__ if isinstance(value, ModuleType) else named(value) if by_name else str(value)
    if isinstance(parts, dict):
        found = {str(name): described(part, above) for name, part in parts.items() if id(part) not in above}
    else:
        found = tuple(described(part, above) for part in parts if id(part) not in above)
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(found, key=repr))
    return found if isinstance(value, (dict, list, tuple, Model)) else (named(value), found) if found else named(value)


def named(value) -> str:
    """A function or class, or an object's class, by its name and its package, none for the model's own."""
    kind = value if hasattr(value, "__qualname__") else type(value)
    name = value.__code__.co_qualname if isinstance(value, FunctionType) else kind.__qualname__
    module = kind.__module__ or Model.__module__  # of those written in C there is none
    return name if module == Model.__module__ else f"{module.partition('.')[0]}.{name}"


def views(model: Model) -> list:
    """Live views of all that a model consists of: where that changes, another object appears in one of them."""
    found, values = {}, [model]
    for value in values:  # which grows on the way
        parts = held(value)
        if parts is not None and id(value) not in found:
            view = found[id(value)] = parts.values() if isinstance(parts, dict) else parts
            module = isinstance(value, torch.nn.Module)
            values += [*given(value).values(), *(parts[name] for name in (*CONTAINERS, *HOOKS))] if module else view
    return [*found.values()]
'''

STATE = '''
SEEN = WeakKeyDictionary()  # for each model: what it held when it was last examined, and what came of that


def weights(model: Model) -> tuple[torch.Tensor, ...] | None:
    """The tensors of the model that the forward reads; `None` where the kernels were not made for it as it is.

    It is examined again once an attribute, a tensor, a submodule or a hook is not the very object that it was.
    """
    seen = SEEN.get(model)
    if seen is not None:
        live, lengths, filled, objects, found = seen
        if [*map(len, live)] == lengths and all(map(is_, chain.from_iterable(filled), objects)):
            return found
    live = views(model)
    filled = [view for view in live if view]  # most are empty, and their lengths tell when they no longer are
    hooked = any(vars(module)[name] for module in islice(model.modules(), 1, None) for name in HOOKS)
    fits = not hooked and $conditions
    found = $weights if fits else None
    SEEN[model] = live, [*map(len, live)], filled, [*chain.from_iterable(filled)], found
    return found
'''

ORDINARY = '''
@cache
def kernels_for(device: torch.device) -> str:
    """The kind of kernels that run on a device, if any of these do."""
    $conditions
    return ""


def ordinary(device: torch.device, *tensors: torch.Tensor) -> bool:
    """Whether these are plain, dense tensors on a device."""
    for t in tensors:
        if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.device != device or t.layout is not torch.strided:
            return False
    return True


def called_plainly() -> bool:
    """Whether nobody looks on: neither a tracer, autocast, a transform, nor a hook of all modules."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or $autocast:
        return False
    looked_at = torch._C._functorch.peek_interpreter_stack() is not None
    return not (looked_at or torch.nn.modules.module._has_any_global_hook())
'''
