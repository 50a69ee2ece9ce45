"""The equation behind all targets on tensors, `y[t] = b[t] + a[t] y[t+1]`, with its derivatives; PyTorch when it is needed."""

import functools
from typing import TYPE_CHECKING, Any

from marginax import _checks as checks

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    Tensor = Any

    class _Lazy:
        """Imports PyTorch when its first attribute is read."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):  # what inspection asks for
                raise AttributeError(name)
            try:
                import torch
            except ImportError:
                raise ImportError("marginax.torch needs PyTorch: pip install torch.") from None
            return getattr(torch, name)

    torch = _Lazy()


def tensor(name: str, value: Any, like: Tensor | None = None) -> Tensor:
    """A tensor of real numbers or flags; what is not a tensor yet gets the type and device of `like`."""
    options = {}
    if like is not None and not isinstance(value, torch.Tensor):
        options = {"dtype": like.dtype, "device": like.device}
    try:
        found = torch.as_tensor(value, **options)
        kind = str(found.dtype) if found.is_complex() else ""
    except (TypeError, ValueError, RuntimeError):
        kind = "None" if value is None else type(value).__name__
    if kind:
        raise ValueError(f"{name} must be a tensor of real numbers, got {kind}")
    return found


def floats(name: str, value: Any, like: Tensor | None = None) -> Tensor:
    """The same in floating point."""
    found = tensor(name, value, like)
    return found if found.is_floating_point() else found.to(torch.get_default_dtype())


def check_dim(name: str, found: Tensor, dim: int) -> None:
    """Raises if a tensor has no step along the dimension of time."""
    checks.whole("dim", dim)
    if found.ndim == 0 or not -found.ndim <= dim < found.ndim or found.shape[dim] == 0:
        shape = tuple(found.shape)
        raise ValueError(f"{name} must have at least one step along dim={dim}, but has shape {shape}.")


def zero_where(mask: Tensor, tensor: Tensor) -> Tensor:
    return torch.where(mask, torch.zeros_like(tensor), tensor)


def shifted(tensor: Tensor, dim: int = -1) -> Tensor:
    """What the next step has; zero at the last step."""
    later = tensor.narrow(dim, 1, tensor.shape[dim] - 1)
    return torch.cat([later, torch.zeros_like(tensor.narrow(dim, 0, 1))], dim)


def _loop(b: Tensor, a: Tensor, dim: int) -> Tensor:
    """Step by step: best on a CPU, where the amount of work counts."""
    y, found = torch.zeros_like(b.select(dim, 0)), []
    for now, factor, closed in zip(
        *(reversed(x.unbind(dim)) for x in (b, a, a == 0)),
        strict=True,
    ):
        y = torch.addcmul(now, factor, y.masked_fill(closed, 0))
        found.append(y)
    return torch.stack(found[::-1], dim)


def _doubling(b: Tensor, a: Tensor, dim: int) -> Tensor:
    """In log₂ T rounds, of which each doubles the steps that `y` covers: best on a GPU."""
    length, reach = b.shape[dim], 1
    while reach < length:
        (b_here, b_rest), (a_here, a_rest) = ((x.split([length - reach, reach], dim)) for x in (b, a))
        b_later, a_later = (x.narrow(dim, reach, length - reach) for x in (b, a))
        closed = a_here == 0
        b = torch.cat([b_here + a_here * b_later.masked_fill(closed, 0), b_rest], dim)
        a = torch.cat([a_here * a_later.masked_fill(closed, 0), torch.zeros_like(a_rest)], dim)
        reach *= 2
    return b


@functools.cache
def _function() -> Any:
    """The recursion as a function that autograd knows, made when PyTorch is there."""

    class Recursion(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(b: Tensor, a: Tensor, cut: Tensor, dim: int) -> Tensor:
            return (_doubling if b.is_cuda else _loop)(b, a, dim)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            _, a, cut, ctx.dim = inputs
            ctx.save_for_backward(a, cut, output)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
            (a, cut, y), dim = ctx.saved_tensors, ctx.dim
            # For db the same recursion, forwards: db[t] = dy[t] + a[t-1] db[t-1].
            db = Recursion.apply(
                gradient.flip(dim), shifted(a.flip(dim), dim), shifted(cut.flip(dim), dim), dim
            )
            da = None
            db = db.flip(dim)
            if ctx.needs_input_grad[1]:
                da = (db * zero_where(cut.expand_as(y), shifted(y, dim))).sum_to_size(a.shape)
            return db, da, None, None

    return Recursion


def recursion(b: Tensor, a: Tensor, cut: Tensor | None = None, *, dim: int = -1) -> Tensor:
    """Computes `y[t] = b[t] + a[t] y[t+1]` backwards from `y[T] = 0`, along one dimension.

    Where `a` is zero nothing that follows is read, not even NaN. A loop over time on the CPU, log₂ T rounds on CUDA;
    differentiable, any number of times.

    Args:
        b: any shape.
        a: the same shape, or sizes of 1 instead, but for the dimension of time.
        cut: where `a` is zero for good, because an episode ended there: the derivative with respect to such an `a[t]` is
            zero. At any other zero it is `y[t+1]`.
        dim: the dimension of time.

    Returns:
        y, of the shape of `b`.

    Raises:
        ValueError: if the shapes do not agree.

    >>> import torch
    >>> recursion(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.5, 0.0, 9.0]))
    tensor([2., 2., 4.])
    """
    b, a = floats("b", b), floats("a", a)
    check_dim("b", b, dim)
    cut = torch.zeros_like(a, dtype=torch.bool) if cut is None else tensor("cut", cut).bool()
    for name, given in (("a", a), ("cut", cut)):
        fits = given.ndim == b.ndim and given.shape[dim] == b.shape[dim]
        if not fits or any(n not in (1, m) for n, m in zip(given.shape, b.shape, strict=True)):
            raise ValueError(
                f"{name} must have the shape {tuple(b.shape)} of b, or sizes of 1 beside dim={dim}, "
                f"but has shape {tuple(given.shape)}."
            )
    dtype = torch.promote_types(b.dtype, a.dtype)
    return _function().apply(b.to(dtype), a.to(dtype), cut, dim)
