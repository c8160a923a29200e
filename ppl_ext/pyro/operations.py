"""The table of operations: name of a PyTorch operation -> the JAX function that computes it.

A recorded program (`ppl_ext.pyro.program`) consists of ATen operations without side effects.
Each entry is called as `function(out, *args, **kwargs)` with the arguments of the ATen operation,
arrays in place of tensors; `out` has the shape and dtype that PyTorch gave to the result (a tuple
of those for several results), so that type promotion and broadcasting are PyTorch's. Gradients
come from JAX; where the two libraries differ (ties, zeros), the entry follows PyTorch.

Operations that are not here but have a decomposition in `torch._decomp` are recorded as that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special
from jax.scipy.linalg import block_diag, expm

Array = jax.Array


class Result(NamedTuple):
    """Shape and dtype of one result of an operation; `dtype` is JAX's for PyTorch's."""

    shape: tuple[int, ...]
    dtype: Any


Function = Callable[..., Any]
OPERATIONS: dict[str, Function] = {}


def operation(*names: str) -> Callable[[Function], Function]:
    """Enter a function into the table under `names`."""

    def enter(function: Function) -> Function:
        for name in names:
            assert name not in OPERATIONS, name
            OPERATIONS[name] = function
        return function

    return enter


def _axes(x: Array, dim: Any) -> tuple[int, ...]:
    """Axes of a reduction: PyTorch reads None and an empty list as all."""
    if dim is None or (isinstance(dim, Sequence) and len(dim) == 0):
        return tuple(range(x.ndim))
    dims = dim if isinstance(dim, Sequence) else (dim,)
    # a 0-d tensor has one dimension here, under the names 0 and -1
    return tuple(d % x.ndim for d in dims) if x.ndim else ()


# --- elementwise -----------------------------------------------------------------------------


def _unary(function: Function) -> Function:
    return lambda out, x: function(jnp.asarray(x, out.dtype))


def _predicate(function: Function) -> Function:
    return lambda out, *args: function(*args)


def _binary(function: Function) -> Function:
    return lambda out, x, y: function(jnp.asarray(x, out.dtype), jnp.asarray(y, out.dtype))


_UNARY: dict[str, Function] = {
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atan": jnp.arctan,
    "atanh": jnp.arctanh,
    "ceil": jnp.ceil,
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "digamma": special.digamma,
    "erf": special.erf,
    "erfc": special.erfc,
    "erfinv": special.erfinv,
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "floor": jnp.floor,
    "frac": lambda x: x - jnp.trunc(x),
    "i0": special.i0,
    "lgamma": special.gammaln,
    "log": jnp.log,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "log2": jnp.log2,
    "neg": jnp.negative,
    "reciprocal": jnp.reciprocal,
    "relu": jax.nn.relu,
    "round": jnp.round,
    "rsqrt": lax.rsqrt,
    "sgn": jnp.sign,
    "sigmoid": jax.nn.sigmoid,
    "sign": jnp.sign,
    "silu": jax.nn.silu,
    "sin": jnp.sin,
    "sinc": jnp.sinc,
    "sinh": jnp.sinh,
    "special_entr": lambda x: jnp.where(x < 0, -jnp.inf, -special.xlogy(x, x)),
    "special_erfcx": lambda x: jnp.exp(x**2) * special.erfc(x),
    "special_i0e": special.i0e,
    "special_i1": special.i1,
    "special_i1e": special.i1e,
    "special_log_ndtr": special.log_ndtr,
    "special_ndtri": special.ndtri,
    "sqrt": jnp.sqrt,
    "tan": jnp.tan,
    "tanh": jnp.tanh,
    "trunc": jnp.trunc,
}
for _name, _function in _UNARY.items():
    operation(_name)(_unary(_function))

_PREDICATES: dict[tuple[str, ...], Function] = {
    ("isnan",): jnp.isnan,
    ("isinf",): jnp.isinf,
    ("isneginf",): jnp.isneginf,
    ("isposinf",): jnp.isposinf,
    ("signbit",): jnp.signbit,
    ("logical_not",): jnp.logical_not,
    ("bitwise_not",): jnp.bitwise_not,
    ("logical_and",): jnp.logical_and,
    ("logical_or",): jnp.logical_or,
    ("logical_xor",): jnp.logical_xor,
    ("bitwise_and.Tensor", "bitwise_and.Scalar"): jnp.bitwise_and,
    ("bitwise_or.Tensor", "bitwise_or.Scalar"): jnp.bitwise_or,
    ("bitwise_xor.Tensor", "bitwise_xor.Scalar"): jnp.bitwise_xor,
    ("eq.Tensor", "eq.Scalar"): jnp.equal,
    ("ne.Tensor", "ne.Scalar"): jnp.not_equal,
    ("lt.Tensor", "lt.Scalar"): jnp.less,
    ("le.Tensor", "le.Scalar"): jnp.less_equal,
    ("gt.Tensor", "gt.Scalar"): jnp.greater,
    ("ge.Tensor", "ge.Scalar"): jnp.greater_equal,
}
for _names, _function in _PREDICATES.items():
    operation(*_names)(_predicate(_function))

_BINARY: dict[tuple[str, ...], Function] = {
    ("mul.Tensor",): jnp.multiply,
    ("div.Tensor",): jnp.true_divide,
    ("floor_divide",): jnp.floor_divide,
    ("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor"): jnp.remainder,
    ("fmod.Tensor", "fmod.Scalar"): jnp.fmod,
    ("maximum",): jnp.maximum,
    ("minimum",): jnp.minimum,
    ("fmax",): jnp.fmax,
    ("fmin",): jnp.fmin,
    ("atan2",): jnp.arctan2,
    ("hypot",): jnp.hypot,
    ("copysign.Tensor", "copysign.Scalar"): jnp.copysign,
    ("heaviside",): jnp.heaviside,
    ("logaddexp",): jnp.logaddexp,
    ("logaddexp2",): jnp.logaddexp2,
    ("xlogy.Tensor", "xlogy.Scalar_Self", "xlogy.Scalar_Other"): special.xlogy,
    (
        "special_xlog1py",
        "special_xlog1py.self_scalar",
        "special_xlog1py.other_scalar",
    ): special.xlog1py,
    ("special_zeta", "special_zeta.self_scalar", "special_zeta.other_scalar"): special.zeta,
    ("igamma",): special.gammainc,
    ("igammac",): special.gammaincc,
}
for _names, _function in _BINARY.items():
    operation(*_names)(_binary(_function))


@operation("abs")
def _abs(out: Result, x: Array) -> Array:
    # PyTorch's gradient at zero is zero, JAX's is one
    size = jnp.abs(x)
    return jnp.where(size == 0, 0, size)


@operation("add.Tensor")
def _add(out: Result, x: Array, y: Array, alpha: Any = 1) -> Array:
    y = jnp.asarray(y, out.dtype)
    return jnp.asarray(x, out.dtype) + (y if alpha == 1 else alpha * y)


@operation("sub.Tensor")
def _sub(out: Result, x: Array, y: Array, alpha: Any = 1) -> Array:
    y = jnp.asarray(y, out.dtype)
    return jnp.asarray(x, out.dtype) - (y if alpha == 1 else alpha * y)


@operation("rsub.Tensor", "rsub.Scalar")
def _rsub(out: Result, x: Array, y: Array, alpha: Any = 1) -> Array:
    return _sub(out, y, x, alpha)


@operation("div.Tensor_mode")
def _div_mode(out: Result, x: Array, y: Array, rounding_mode: str | None = None) -> Array:
    x, y = jnp.asarray(x, out.dtype), jnp.asarray(y, out.dtype)
    if rounding_mode == "floor":
        return jnp.floor_divide(x, y)
    if rounding_mode == "trunc":
        return lax.div(*jnp.broadcast_arrays(x, y)) if _is_integer(x) else jnp.trunc(x / y)
    return x / y


def _is_integer(x: Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.integer))


@operation("pow.Tensor_Scalar")
def _pow_scalar(out: Result, x: Array, exponent: Any) -> Array:
    x = jnp.asarray(x, out.dtype)
    if float(exponent).is_integer() and abs(exponent) < 64:
        return lax.integer_pow(x, int(exponent))
    return jnp.sqrt(x) if exponent == 0.5 else x**exponent


@operation("pow.Tensor_Tensor", "pow.Scalar")
def _pow(out: Result, x: Array, y: Array) -> Array:
    return jnp.power(jnp.asarray(x, out.dtype), jnp.asarray(y, out.dtype))


@operation("polygamma")
def _polygamma(out: Result, n: int, x: Array) -> Array:
    x = jnp.asarray(x, out.dtype)
    return special.digamma(x) if n == 0 else special.polygamma(n, x)


@operation("round.decimals")
def _round_decimals(out: Result, x: Array, decimals: int) -> Array:
    return jnp.round(x, decimals)


@operation("logit")
def _logit(out: Result, x: Array, eps: float | None = None) -> Array:
    x = jnp.asarray(x, out.dtype)
    return special.logit(x if eps is None else _clamp(out, x, eps, 1 - eps))


@operation("clamp", "clamp.Tensor")
def _clamp(out: Result, x: Array, low: Any = None, high: Any = None) -> Array:
    """At a bound the gradient passes, where `jnp.clip` would halve it."""
    x = jnp.asarray(x, out.dtype)
    # a NaN bound gives NaN, whatever x
    if low is not None:
        low = jnp.asarray(low, out.dtype)
        x = jnp.where(~(x < low) & ~jnp.isnan(low) | jnp.isnan(x), x, low)
    if high is not None:
        high = jnp.asarray(high, out.dtype)
        x = jnp.where(~(x > high) & ~jnp.isnan(high) | jnp.isnan(x), x, high)
    return x


@operation("clamp_min", "clamp_min.Tensor")
def _clamp_min(out: Result, x: Array, low: Any) -> Array:
    return _clamp(out, x, low)


@operation("clamp_max", "clamp_max.Tensor")
def _clamp_max(out: Result, x: Array, high: Any) -> Array:
    return _clamp(out, x, None, high)


@operation("nan_to_num")
def _nan_to_num(
    out: Result, x: Array, nan: Any = None, posinf: Any = None, neginf: Any = None
) -> Array:
    return jnp.nan_to_num(x, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf)


@operation("lerp.Scalar", "lerp.Tensor")
def _lerp(out: Result, x: Array, y: Array, weight: Any) -> Array:
    return x + weight * (y - x)


@operation("addcmul")
def _addcmul(out: Result, x: Array, a: Array, b: Array, value: Any = 1) -> Array:
    return x + value * a * b


@operation("addcdiv")
def _addcdiv(out: Result, x: Array, a: Array, b: Array, value: Any = 1) -> Array:
    return x + value * a / b


@operation("where.self")
def _where(out: Result, condition: Array, x: Array, y: Array) -> Array:
    return jnp.where(condition, jnp.asarray(x, out.dtype), jnp.asarray(y, out.dtype))


@operation("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(out: Result, x: Array, mask: Array, value: Any) -> Array:
    return jnp.where(mask, jnp.asarray(value, out.dtype), x)


@operation("clone", "alias")
def _same(out: Result, x: Array, **_: Any) -> Array:
    return x


operation("_conj", "_conj_physical")(lambda out, x: jnp.conj(x))
operation("angle")(lambda out, x: jnp.angle(x))


@operation("_to_copy")
def _to_copy(out: Result, x: Array, **_: Any) -> Array:
    return x.astype(out.dtype)


@operation("copy")
def _copy(out: Result, x: Array, source: Array, non_blocking: bool = False) -> Array:
    return jnp.broadcast_to(jnp.asarray(source, out.dtype), out.shape)


@operation("detach")
def _detach(out: Result, x: Array) -> Array:
    return lax.stop_gradient(x)


# --- activations -----------------------------------------------------------------------------


@operation("softplus")
def _softplus(out: Result, x: Array, beta: Any = 1, threshold: Any = 20) -> Array:
    return jnp.where(x * beta > threshold, x, jax.nn.softplus(x * beta) / beta)


@operation("log_sigmoid_forward")
def _log_sigmoid(out: tuple[Result, Result], x: Array) -> tuple[Array, Array]:
    # the second result is scratch space of PyTorch's backward pass
    return jax.nn.log_sigmoid(x), jnp.zeros(out[1].shape, out[1].dtype)


@operation("gelu")
def _gelu(out: Result, x: Array, approximate: str = "none") -> Array:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


@operation("elu")
def _elu(out: Result, x: Array, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Array:
    negative = jnp.where(x > 0, 0.0, x)
    return jnp.where(x > 0, x * scale, alpha * scale * jnp.expm1(negative * input_scale))


@operation("leaky_relu")
def _leaky_relu(out: Result, x: Array, negative_slope: Any = 0.01) -> Array:
    return jnp.where(x > 0, x, negative_slope * x)


@operation("hardtanh")
def _hardtanh(out: Result, x: Array, low: Any = -1, high: Any = 1) -> Array:
    # unlike clamp, no gradient at the bounds
    inside = (x > low) & (x < high)
    return jnp.where(inside | jnp.isnan(x), x, lax.stop_gradient(jnp.clip(x, low, high)))


@operation("_softmax")
def _softmax(out: Result, x: Array, dim: int, half_to_float: bool) -> Array:
    return jax.nn.softmax(x, dim) if x.ndim else jnp.ones_like(x)


@operation("_log_softmax")
def _log_softmax(out: Result, x: Array, dim: int, half_to_float: bool) -> Array:
    return jax.nn.log_softmax(x, dim) if x.ndim else jnp.zeros_like(x)


@operation("embedding")
def _embedding(out: Result, weight: Array, index: Array, padding_idx: int = -1, *_: Any) -> Array:
    rows = jnp.take(weight, index, axis=0, mode="clip")
    if padding_idx < 0:
        return rows
    return jnp.where((index == padding_idx)[..., None], lax.stop_gradient(rows), rows)


# --- reductions ------------------------------------------------------------------------------


def _reduction(function: Function) -> Function:
    def reduce(out: Result, x: Array, dim: Any = None, keepdim: bool = False, **_: Any) -> Array:
        x = x.astype(out.dtype)
        return function(x, axis=_axes(x, dim), keepdims=keepdim and x.ndim > 0)

    return reduce


operation("sum", "sum.dim_IntList")(_reduction(jnp.sum))
operation("mean", "mean.dim")(_reduction(jnp.mean))
operation("prod", "prod.dim_int")(_reduction(jnp.prod))
operation("nansum")(_reduction(jnp.nansum))
operation("amax", "max")(_reduction(jnp.max))
operation("amin", "min")(_reduction(jnp.min))
operation("all", "all.dim", "all.dims")(_reduction(lambda x, **k: jnp.all(x, **k)))
operation("any", "any.dim", "any.dims")(_reduction(lambda x, **k: jnp.any(x, **k)))
operation("logsumexp")(_reduction(special.logsumexp))


def _extreme(arg: Function, out: Any, x: Array, dim: int, keepdim: bool = False) -> Any:
    if x.ndim == 0:
        return x, jnp.zeros((), out[1].dtype)
    index = arg(x, axis=dim, keepdims=True)
    value = jnp.take_along_axis(x, index, axis=dim)
    return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))


operation("max.dim")(partial(_extreme, jnp.argmax))
operation("min.dim")(partial(_extreme, jnp.argmin))


def _arg(function: Function) -> Function:
    def arg(out: Result, x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
        if x.ndim == 0:
            return jnp.zeros((), out.dtype)
        return jnp.reshape(function(x, axis=dim), out.shape)

    return arg


operation("argmax")(_arg(jnp.argmax))
operation("argmin")(_arg(jnp.argmin))


def _moment(out: Result, x: Array, dim: Any, correction: Any, keepdim: bool) -> Array:
    axes = _axes(x, dim)
    count = math.prod(x.shape[a] for a in axes)
    centred = x - jnp.mean(x, axis=axes, keepdims=True)
    total = jnp.sum(centred**2, axis=axes, keepdims=keepdim and x.ndim > 0)
    return total / jnp.maximum(count - (1 if correction is None else correction), 0)


@operation("var.correction")
def _var(
    out: Result, x: Array, dim: Any = None, *, correction: Any = 1, keepdim: bool = False
) -> Array:
    return _moment(out, x, dim, correction, keepdim)


@operation("std.correction")
def _std(
    out: Result, x: Array, dim: Any = None, *, correction: Any = 1, keepdim: bool = False
) -> Array:
    return jnp.sqrt(_moment(out, x, dim, correction, keepdim))


@operation("var_mean.correction")
def _var_mean(
    out: Any, x: Array, dim: Any = None, *, correction: Any = 1, keepdim: bool = False
) -> Any:
    mean = jnp.mean(x, axis=_axes(x, dim), keepdims=keepdim and x.ndim > 0)
    return _moment(out[0], x, dim, correction, keepdim), mean


@operation("linalg_vector_norm")
def _vector_norm(
    out: Result, x: Array, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Array:
    x = x.astype(out.dtype)
    axes, keepdim = _axes(x, dim), keepdim and x.ndim > 0
    if ord == math.inf:
        return jnp.max(jnp.abs(x), axis=axes, keepdims=keepdim)
    if ord == -math.inf:
        return jnp.min(jnp.abs(x), axis=axes, keepdims=keepdim)
    if ord == 0:
        return jnp.sum(x != 0, axis=axes, keepdims=keepdim).astype(out.dtype)
    size = x if ord == 2 else _abs(out, x)
    total = jnp.sum(size if ord == 1 else size**ord, axis=axes, keepdims=keepdim)
    if ord == 1:
        return total
    # PyTorch's gradient of a vanishing norm is zero, not NaN
    safe = jnp.where(total == 0, 1.0, total)
    root = jnp.sqrt(safe) if ord == 2 else safe ** (1 / ord)
    return jnp.where(total == 0, 0.0, root)


@operation("norm.Scalar", "norm.ScalarOpt_dim")
def _norm(out: Result, x: Array, p: Any = 2, dim: Any = None, keepdim: bool = False) -> Array:
    return _vector_norm(out, x, 2 if p is None else p, dim, keepdim)


def _cumulative(function: Function) -> Function:
    def run(out: Result, x: Array, dim: int, **_: Any) -> Array:
        x = x.astype(out.dtype)
        return function(x, axis=dim % x.ndim) if x.ndim else x

    return run


operation("cumsum")(_cumulative(jnp.cumsum))
operation("cumprod")(_cumulative(jnp.cumprod))
operation("logcumsumexp")(_cumulative(lax.cumlogsumexp))


def _running_extreme(running: Function, out: Any, x: Array, dim: int) -> Any:
    if x.ndim == 0:
        return x, jnp.zeros((), out[1].dtype)
    axis = dim % x.ndim
    positions = lax.broadcasted_iota(out[1].dtype, x.shape, axis)
    index = lax.cummax(jnp.where(x == running(x, axis=axis), positions, 0), axis=axis)
    return jnp.take_along_axis(x, index, axis=axis), index


operation("cummax")(partial(_running_extreme, lax.cummax))
operation("cummin")(partial(_running_extreme, lax.cummin))


@operation("sort", "sort.stable")
def _sort(
    out: Any, x: Array, dim: int = -1, descending: bool = False, stable: bool | None = None
) -> Any:
    if x.ndim == 0:
        return x, jnp.zeros((), out[1].dtype)
    index = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, index, axis=dim), index


@operation("topk")
def _topk(
    out: Any, x: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Any:
    value, index = _sort((Result(x.shape, x.dtype), out[1]), x, dim, largest)
    if x.ndim == 0:
        return value, index
    return lax.slice_in_dim(value, 0, k, axis=dim), lax.slice_in_dim(index, 0, k, axis=dim)


# --- shapes ----------------------------------------------------------------------------------


@operation("view", "_unsafe_view", "unsqueeze", "squeeze", "squeeze.dim", "squeeze.dims")
def _reshape(out: Result, x: Array, *_: Any) -> Array:
    return jnp.reshape(x, out.shape)


@operation("expand")
def _expand(out: Result, x: Array, *_: Any, **__: Any) -> Array:
    return jnp.broadcast_to(x, out.shape)


@operation("permute")
def _permute(out: Result, x: Array, dims: Sequence[int]) -> Array:
    return jnp.transpose(x, [d % x.ndim for d in dims]) if x.ndim else x


@operation("transpose.int")
def _transpose(out: Result, x: Array, a: int, b: int) -> Array:
    return jnp.swapaxes(x, a, b) if x.ndim else x


@operation("t")
def _t(out: Result, x: Array) -> Array:
    return x.T


@operation("repeat")
def _repeat(out: Result, x: Array, repeats: Sequence[int]) -> Array:
    return jnp.tile(x, tuple(repeats))


@operation("cat")
def _cat(out: Result, tensors: Sequence[Array], dim: int = 0) -> Array:
    # PyTorch skips empty one-dimensional tensors, whatever the shape of the others
    rank = len(out.shape)
    kept = [x.astype(out.dtype) for x in tensors if x.ndim == rank]
    return jnp.concatenate(kept, dim)


@operation("stack")
def _stack(out: Result, tensors: Sequence[Array], dim: int = 0) -> Array:
    return jnp.stack([x.astype(out.dtype) for x in tensors], dim)


@operation("split.Tensor", "split_with_sizes", "unsafe_split.Tensor", "split_with_sizes_copy")
def _split(out: Sequence[Result], x: Array, _: Any, dim: int = 0) -> list[Array]:
    ends = np.cumsum([result.shape[dim] for result in out])
    return jnp.split(x, ends[:-1].tolist(), axis=dim)


@operation("unbind.int")
def _unbind(out: Sequence[Result], x: Array, dim: int = 0) -> list[Array]:
    return [jnp.squeeze(part, dim) for part in jnp.split(x, x.shape[dim], axis=dim)]


def _slices(x: Array, dim: int, start: int | None, end: int | None, step: int) -> tuple:
    index = [slice(None)] * x.ndim
    index[dim] = slice(start, end, step)
    return tuple(index)


@operation("slice.Tensor")
def _slice(
    out: Result, x: Array, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Array:
    return x[_slices(x, dim, start, end, step)]


@operation("slice_scatter")
def _slice_scatter(
    out: Result, x: Array, y: Array, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Array:
    return x.at[_slices(x, dim, start, end, step)].set(y.astype(out.dtype))


@operation("select.int")
def _select(out: Result, x: Array, dim: int, index: int) -> Array:
    return lax.index_in_dim(x, index, dim, keepdims=False)


@operation("select_scatter")
def _select_scatter(out: Result, x: Array, y: Array, dim: int, index: int) -> Array:
    moved = jnp.moveaxis(x, dim, 0)
    return jnp.moveaxis(moved.at[index].set(y.astype(out.dtype)), 0, dim)


@operation("diagonal")
def _diagonal(out: Result, x: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    return jnp.diagonal(x, offset, dim1, dim2)


@operation("diagonal_scatter")
def _diagonal_scatter(
    out: Result, x: Array, y: Array, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Array:
    moved = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    rows = jnp.arange(y.shape[-1]) + max(-offset, 0)
    columns = jnp.arange(y.shape[-1]) + max(offset, 0)
    moved = moved.at[..., rows, columns].set(y.astype(out.dtype))
    return jnp.moveaxis(moved, (-2, -1), (dim1, dim2))


@operation("diag_embed")
def _diag_embed(out: Result, x: Array, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Array:
    zeros = jnp.zeros(out.shape, out.dtype)
    return _diagonal_scatter(out, zeros, x, offset, dim1, dim2)


@operation("flip")
def _flip(out: Result, x: Array, dims: Sequence[int]) -> Array:
    return jnp.flip(x, tuple(dims)) if x.ndim else x


@operation("roll")
def _roll(out: Result, x: Array, shifts: Sequence[int], dims: Sequence[int] = ()) -> Array:
    if not dims:
        return jnp.roll(x, shifts[0] if isinstance(shifts, Sequence) else shifts)
    return jnp.roll(x, tuple(shifts), tuple(dims))


@operation("tril")
def _tril(out: Result, x: Array, diagonal: int = 0) -> Array:
    return jnp.tril(x, diagonal)


@operation("triu")
def _triu(out: Result, x: Array, diagonal: int = 0) -> Array:
    return jnp.triu(x, diagonal)


@operation("unfold")
def _unfold(out: Result, x: Array, dim: int, size: int, step: int) -> Array:
    if x.ndim == 0:
        return jnp.reshape(x, out.shape)
    starts = step * np.arange(out.shape[dim % x.ndim])
    windows = jnp.take(x, starts[:, None] + np.arange(size), axis=dim % x.ndim)
    return jnp.moveaxis(windows, dim % x.ndim + 1, -1)


@operation("constant_pad_nd")
def _pad(out: Result, x: Array, pad: Sequence[int], value: Any = 0) -> Array:
    # `pad` starts at the last dimension; negative widths crop
    widths = [(0, 0, 0)] * x.ndim
    for i in range(len(pad) // 2):
        widths[x.ndim - 1 - i] = (pad[2 * i], pad[2 * i + 1], 0)
    return lax.pad(x, jnp.asarray(value, x.dtype), widths)


@operation("block_diag")
def _block_diag(out: Result, tensors: Sequence[Array]) -> Array:
    return block_diag(*[x.astype(out.dtype) for x in tensors])


# --- indices ---------------------------------------------------------------------------------


def _index_tuple(indices: Sequence[Array | None]) -> tuple:
    return tuple(slice(None) if i is None else i for i in indices)


@operation("index.Tensor", "_unsafe_index.Tensor")
def _index(out: Result, x: Array, indices: Sequence[Array | None]) -> Array:
    return x[_index_tuple(indices)]


@operation("index_put", "_unsafe_index_put")
def _index_put(
    out: Result, x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False
) -> Array:
    values = values.astype(out.dtype)
    if len(indices) == 1 and indices[0] is not None and indices[0].dtype == bool:
        # a mask that depends on a latent value; the recorder lets scalars through only
        mask = indices[0].reshape(indices[0].shape + (1,) * (x.ndim - indices[0].ndim))
        return jnp.where(mask, x + values if accumulate else values, x)
    at = x.at[_index_tuple(indices)]
    return at.add(values) if accumulate else at.set(values)


@operation("index_select")
def _index_select(out: Result, x: Array, dim: int, index: Array) -> Array:
    return jnp.take(x, index, axis=dim, mode="clip") if x.ndim else jnp.reshape(x, out.shape)


@operation("index_add")
def _index_add(out: Result, x: Array, dim: int, index: Array, y: Array, alpha: Any = 1) -> Array:
    if x.ndim == 0:
        return x + alpha * jnp.sum(y)
    moved = jnp.moveaxis(x, dim, 0).at[index].add(alpha * jnp.moveaxis(y, dim, 0))
    return jnp.moveaxis(moved, 0, dim)


@operation("index_copy")
def _index_copy(out: Result, x: Array, dim: int, index: Array, y: Array) -> Array:
    moved = jnp.moveaxis(x, dim, 0).at[index].set(jnp.moveaxis(y, dim, 0))
    return jnp.moveaxis(moved, 0, dim)


def _grid(index: Array, dim: int) -> tuple:
    grid: list[Any] = list(jnp.ogrid[tuple(slice(n) for n in index.shape)])
    grid[dim] = index
    return tuple(grid)


@operation("gather")
def _gather(out: Result, x: Array, dim: int, index: Array, sparse_grad: bool = False) -> Array:
    if x.ndim == 0 or index.ndim == 0:
        return jnp.reshape(jnp.broadcast_to(x.reshape(-1)[:1], (max(index.size, 1),)), out.shape)
    return x[_grid(index, dim)]


def _scatter(out: Result, x: Array, dim: int, index: Array, source: Any, how: str) -> Array:
    if x.ndim == 0:
        x, index = x[None], index.reshape(-1)
        source = jnp.reshape(source, (-1,)) if jnp.ndim(source) == 0 else source
        return _scatter(out, x, 0, index, source, how)[0]
    if index.size == 0:
        return x
    if jnp.ndim(source):
        source = source[tuple(slice(n) for n in index.shape)]
    return getattr(x.at[_grid(index, dim)], how)(source)


@operation("scatter.src", "scatter.value")
def _scatter_set(out: Result, x: Array, dim: int, index: Array, source: Any) -> Array:
    return _scatter(out, x, dim, index, source, "set")


@operation("scatter_add")
def _scatter_add(out: Result, x: Array, dim: int, index: Array, source: Any) -> Array:
    return _scatter(out, x, dim, index, source, "add")


@operation("take")
def _take(out: Result, x: Array, index: Array) -> Array:
    return jnp.ravel(x)[index]


# --- linear algebra --------------------------------------------------------------------------


@operation("mm", "bmm", "mv", "dot")
def _matmul(out: Result, x: Array, y: Array) -> Array:
    return jnp.matmul(x, y)


@operation("addmm", "addmv", "baddbmm")
def _addmm(out: Result, c: Array, x: Array, y: Array, beta: Any = 1, alpha: Any = 1) -> Array:
    product = jnp.matmul(x, y)
    product = product if alpha == 1 else alpha * product
    # with beta = 0 the first argument is ignored, NaN or not
    return product if beta == 0 else (c if beta == 1 else beta * c) + product


@operation("linalg_cholesky_ex")
def _cholesky_ex(out: Any, x: Array, *, upper: bool = False, check_errors: bool = False) -> Any:
    return _cholesky(out[0], x, upper), jnp.zeros(out[1].shape, out[1].dtype)


@operation("cholesky")
def _cholesky(out: Result, x: Array, upper: bool = False) -> Array:
    # NaN where the matrix is not positive definite; PyTorch raises there
    factor = jnp.linalg.cholesky(x.mT if upper else x)
    return factor.mT if upper else factor


@operation("linalg_solve_triangular")
def _solve_triangular(
    out: Result, a: Array, b: Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Array:
    batch = out.shape[:-2]
    a = jnp.broadcast_to(a, batch + a.shape[-2:])
    b = jnp.broadcast_to(b, batch + b.shape[-2:])
    return lax.linalg.triangular_solve(
        a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular
    )


@operation("triangular_solve")
def _triangular_solve(
    out: Any,
    b: Array,
    a: Array,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> Any:
    if transpose:
        a, upper = a.mT, not upper
    solution = _solve_triangular(out[0], a, b, upper=upper, unitriangular=unitriangular)
    return solution, jnp.broadcast_to(a, out[1].shape)


@operation("cholesky_solve")
def _cholesky_solve(out: Result, b: Array, factor: Array, upper: bool = False) -> Array:
    lower = factor.mT if upper else factor
    half = _solve_triangular(out, lower, b, upper=False)
    return _solve_triangular(out, lower.mT, half, upper=True)


@operation("cholesky_inverse")
def _cholesky_inverse(out: Result, factor: Array, upper: bool = False) -> Array:
    eye = jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape)
    return _cholesky_solve(out, eye, factor, upper)


def _scratch(results: Sequence[Result]) -> list[Array]:
    """Results that only PyTorch's backward pass reads."""
    return [jnp.zeros(result.shape, result.dtype) for result in results]


@operation("_linalg_solve_ex")
def _solve_ex(
    out: Any, a: Array, b: Array, *, left: bool = True, check_errors: bool = False
) -> Any:
    if b.ndim == a.ndim - 1:
        solution = jnp.linalg.solve(a, b[..., None])[..., 0]
    elif left:
        solution = jnp.linalg.solve(a, b)
    else:
        solution = jnp.linalg.solve(a.mT, b.mT).mT
    return [solution, *_scratch(out[1:])]


@operation("linalg_inv_ex")
def _inv_ex(out: Any, a: Array, *, check_errors: bool = False) -> Any:
    return [jnp.linalg.inv(a), *_scratch(out[1:])]


@operation("_linalg_det")
def _det(out: Any, a: Array) -> Any:
    return [jnp.linalg.det(a), *_scratch(out[1:])]


@operation("_linalg_slogdet")
def _slogdet(out: Any, a: Array) -> Any:
    return [*jnp.linalg.slogdet(a), *_scratch(out[2:])]


@operation("_linalg_eigh")
def _eigh(out: Any, a: Array, uplo: str = "L", compute_v: bool = True) -> Any:
    values, vectors = jnp.linalg.eigh(a, UPLO=uplo)
    return values, vectors if compute_v else jnp.zeros(out[1].shape, out[1].dtype)


@operation("linalg_qr")
def _qr(out: Any, a: Array, mode: str = "reduced") -> Any:
    q, r = jnp.linalg.qr(a, mode)
    return q, r


@operation("_linalg_svd")
def _svd(
    out: Any, a: Array, full_matrices: bool = False, compute_uv: bool = True, *, driver: Any = None
) -> Any:
    if not compute_uv:
        singular = jnp.linalg.svd(a, compute_uv=False)
        return [_scratch(out[:1])[0], singular, _scratch(out[2:])[0]]
    return list(jnp.linalg.svd(a, full_matrices=full_matrices))


@operation("linalg_matrix_exp")
def _matrix_exp(out: Result, a: Array) -> Array:
    return expm(a)


@operation("linalg_cross")
def _cross(out: Result, x: Array, y: Array, *, dim: int = -1) -> Array:
    x, y = jnp.broadcast_arrays(x, y)
    return jnp.cross(x, y, axis=dim)


@operation("_cdist_forward")
def _cdist(out: Result, x: Array, y: Array, p: float, compute_mode: Any) -> Array:
    difference = x[..., :, None, :] - y[..., None, :, :]
    return _vector_norm(out, difference, p, -1)


# --- Fourier transforms ----------------------------------------------------------------------


def _norm_factor(lengths: Sequence[int], normalization: int) -> float:
    """0 is none, 1 the root of the number of points, 2 the number of points."""
    return math.prod(lengths) ** (-normalization / 2)


@operation("_fft_r2c")
def _fft_r2c(
    out: Result, x: Array, dim: Sequence[int], normalization: int, onesided: bool
) -> Array:
    transform = jnp.fft.rfftn if onesided else jnp.fft.fftn
    return transform(x, axes=tuple(dim)) * _norm_factor([x.shape[d] for d in dim], normalization)


@operation("_fft_c2r")
def _fft_c2r(out: Result, x: Array, dim: Sequence[int], normalization: int, last: int) -> Array:
    lengths = [x.shape[d] for d in dim[:-1]] + [last]
    value = jnp.fft.irfftn(x, lengths, tuple(dim))
    return value * math.prod(lengths) * _norm_factor(lengths, normalization)


@operation("_fft_c2c")
def _fft_c2c(out: Result, x: Array, dim: Sequence[int], normalization: int, forward: bool) -> Array:
    lengths = [x.shape[d] for d in dim]
    if forward:
        return jnp.fft.fftn(x, axes=tuple(dim)) * _norm_factor(lengths, normalization)
    value = jnp.fft.ifftn(x, axes=tuple(dim))
    return value * math.prod(lengths) * _norm_factor(lengths, normalization)


@operation("view_as_real")
def _view_as_real(out: Result, x: Array) -> Array:
    return jnp.stack([x.real, x.imag], -1)


@operation("view_as_complex")
def _view_as_complex(out: Result, x: Array) -> Array:
    return lax.complex(x[..., 0], x[..., 1])


@operation("complex")
def _complex(out: Result, real: Array, imag: Array) -> Array:
    return lax.complex(*jnp.broadcast_arrays(real, imag))


# --- convolutions ----------------------------------------------------------------------------


@operation("convolution")
def _convolution(
    out: Result,
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Array:
    rank = len(out.shape) - 2
    spread = lambda values: tuple(values) * (rank if len(values) == 1 else 1)  # noqa: E731
    stride, padding, dilation = spread(stride), spread(padding), spread(dilation)
    pads = [(p, p) for p in padding]
    if transposed:
        # the adjoint of a convolution: flipped kernel over inputs spread by the stride
        extra = spread(output_padding)
        shape = weight.shape
        weight = weight.reshape(groups, shape[0] // groups, *shape[1:]).swapaxes(1, 2)
        weight = weight.reshape(groups * shape[1], shape[0] // groups, *shape[2:])
        weight = jnp.flip(weight, tuple(range(2, rank + 2)))
        reach = [d * (n - 1) for d, n in zip(dilation, shape[2:], strict=True)]
        pads = [(r - p, r - p + e) for r, p, e in zip(reach, padding, extra, strict=True)]
        y = lax.conv_general_dilated(
            x, weight, (1,) * rank, pads, stride, dilation, feature_group_count=groups
        )
    else:
        y = lax.conv_general_dilated(
            x, weight, stride, pads, rhs_dilation=dilation, feature_group_count=groups
        )
    return y if bias is None else y + bias.reshape(-1, *[1] * rank)
