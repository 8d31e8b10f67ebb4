"""The parts of a solution file that are the same in every one; ``$name`` stands for what differs."""

CUDA_LIBRARY = '''
@cache
def library(device: int) -> ctypes.CDLL:
    """The kernels for a device, built when first used.

    Plain C functions, called through ctypes: compiling PyTorch's C++ headers would take most of a minute.
    """
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    path = load_inline(
        name=f"${extension}_{arch}",
        cpp_sources="",
        cuda_sources=[$sources],
        extra_cuda_cflags=[f"-arch={arch}", "-std=c++17"],
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
def library() -> ctypes.CDLL:
    """The kernels, built for this machine's processor when first used.

    Plain C functions, called through ctypes.  Compiled with OpenMP and linked without, so that PyTorch's threads serve.
    """
    path = load_inline(
        name=f"${extension}_{torch.backends.cpu.get_cpu_capability()}",
        cpp_sources=[$sources],
        extra_cflags=[$flags],
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
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
"""

DENSE = '''
def dense(
    kernel: str,
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    layout: torch.memory_format = torch.contiguous_format,
) -> torch.Tensor:
    """An operand as kernels read it: without gaps, from a multiple of $multiple on.

    Raises `ValueError` for one that the kernel was not made for.
    """
    if not tensor.$here or tensor.dtype is not dtype:
        raise ValueError(f"{kernel} takes {name} as {dtype} $where, not as {tensor.dtype} on {tensor.device}")
    tensor = tensor.resolve_neg()
    if tensor.is_contiguous(memory_format=layout) and tensor.data_ptr() % $alignment == 0:
        return tensor
    return tensor.clone(memory_format=layout)
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
    def backward(ctx, grad):
        """The gradients of the operands that need one."""
        again = torch.is_grad_enabled()
        needed = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            # Views, so that no gradient flows from one operand to another that it was computed from.
            operands = [operand.view_as(operand) for operand in ctx.saved_tensors]
            value = ctx.reference(*operands)
        wanted = [operand for operand, need in zip(operands, needed, strict=True) if need]
        found = iter(torch.autograd.grad(value, wanted, grad, create_graph=again, allow_unused=True))
        return None, None, *(next(found) if need else None for need in needed)


def differentiable(launch, reference, *operands: torch.Tensor) -> torch.Tensor:
    """`launch(*operands)`, through which gradients flow as through `reference(*operands)`."""
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        return Recomputed.apply(launch, reference, *operands)
    return launch(*operands)
'''

TF32 = '''
def tf32_allowed() -> bool:
    """Whether PyTorch's settings let float32 $operations round their operands to tf32, as the kernels do."""
    own = torch.backends.$setting.fp32_precision
    return (torch.backends.fp32_precision if own == "none" else own) == "tf32"
'''

DERIVED = '''
KEPT = WeakKeyDictionary()  # for each model: its weights when they were last derived, and what they came to


def derived(model: Model) -> tuple[torch.Tensor, ...]:
    """What the forward computes of weights alone: kept while no weight changes and no gradient flows through."""
    sources = $sources
    if any(source.is_inference() or (source.requires_grad and torch.is_grad_enabled()) for source in sources):
        return model.$derive()
    now = [(id(source), source._version, source.data_ptr()) for source in sources]
    kept = KEPT.get(model)
    if kept is None or kept[0] != now:
        with torch.inference_mode(False), torch.no_grad():
            kept = KEPT[model] = now, model.$derive(), sources  # the weights too, so that nothing else gets their ids
    return kept[1]
'''

CONFIGURATION = '''
def configuration(model: Model) -> dict:
    """What a forward may depend on besides tensors: for each submodule its class and plain attributes."""
    found = {}
    for path, module in model.named_modules():
        values = {name: described(value) for name, value in vars(module).items() if name[0] != "_"}
        values = {name: value for name, value in values.items() if name not in ("training", "fits")}
        found[path] = (type(module).__name__ if path else "", values)
    return found


def described(value):
    """A plain value as it is, a container by its items, anything else by its name."""
    if isinstance(value, (list, tuple)):
        return tuple(described(item) for item in value)
    if isinstance(value, dict):
        return {str(key): described(item) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return getattr(value, "__qualname__", type(value).__qualname__)
'''

ORDINARY = '''
@cache
def runs_kernels(device: torch.device) -> bool:
    """Whether a device is one that this file is made for."""
    return $condition


def ordinary(device: torch.device, *tensors: torch.Tensor) -> bool:
    """Whether these are plain, dense tensors on a device."""
    for t in tensors:
        if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.device != device or t.layout is not torch.strided:
            return False
    return True


def called_plainly(model: Model) -> bool:
    """Whether nobody looks on: neither a tracer, autocast, a transform, nor a hook inside the model."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.is_autocast_enabled("$device"):
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    inner = islice(model.modules(), 1, None)
    return not any(m._forward_pre_hooks or m._forward_hooks or m._backward_hooks for m in inner)
'''
