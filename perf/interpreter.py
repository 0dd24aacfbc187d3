"""Triton's interpreter made as strict as a GPU, and stricter.

Left alone it takes the bits of bf16 numbers for integers, truncates where a GPU rounds, multiplies fp32 exactly where a GPU would use
TF32, reads and writes wherever a wrong pointer leads, and lets 32-bit offsets wrap around. Only for processes with TRITON_INTERPRET=1.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterBuilder, ReduceOps, TensorHandle

ARITHMETIC = ("fadd", "fsub", "fmul", "fdiv", "frem", "precise_divf", "fma", "clampf", "floor", "ceil", "minimumf", "maximumf", "minnumf",
              "maxnumf")
EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
SMALLEST_K = {64: 4, 8: 32}  # of a product, by bits of an element; 16 for the others


def make_strict() -> None:
    """Replaces methods of the interpreter; call it once a process."""
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, debug=True)  # device_assert, and an error where a 32-bit sum or product wraps
    builder.codegen_fns["min_dot_size"] = lambda a, b: (1, 1, SMALLEST_K.get(a.scalar.primitive_bitwidth, 16))
    for name in ARITHMETIC:
        _replace(InterpreterBuilder, f"create_{name}", _rounded)
    for name in dir(InterpreterBuilder):
        if name.startswith("create_fcmp"):
            _replace(InterpreterBuilder, name, _compared)
    _replace(TritonSemantic, "binary_op_sanitize_overflow_impl", _bounded)
    _replace(InterpretedFunction, "__call__", _once)
    _replace(InterpreterBuilder, "create_dot", _multiplied)
    _replace(InterpreterBuilder, "cast_impl", _cast)
    _replace(InterpreterBuilder, "create_fp_to_fp", _cast)
    InterpreterBuilder.get_bf16 = lambda self, value: _round(np.array([value], np.float32))
    _replace(ReduceOps, "sum", _wide_only)
    _replace(GridExecutor, "_init_args_hst", _remember_tensors)
    _replace(GridExecutor, "_restore_args_dev", lambda restore: lambda self, *arguments: None)  # would copy each tensor onto itself
    _replace(InterpreterBuilder, "create_masked_load", _checked(mask=1))
    _replace(InterpreterBuilder, "create_masked_store", _checked(mask=2))


def _replace(owner: type, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(owner, name, change(getattr(owner, name)))


def _is_bf16(x: Any) -> bool:
    return isinstance(x, TensorHandle) and x.dtype.scalar == tl.bfloat16


def _widen(x: Any) -> Any:
    """bf16 is the upper half of fp32."""
    return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32) if _is_bf16(x) else x


def _round(x: Any) -> TensorHandle:
    """bf16 of numbers, to the nearest, ties to even."""
    wide = np.ascontiguousarray(x, np.float32)
    bits = wide.view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return TensorHandle(np.where(np.isnan(wide), 0x7FC0, nearest).astype(np.uint16).reshape(np.shape(x)), tl.bfloat16)


def _rounded(operation: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *operands: Any, **options: Any) -> Any:
        if not any(map(_is_bf16, operands)):
            return operation(self, *operands, **options)
        return _round(operation(self, *map(_widen, operands), **options).data)

    return run


def _compared(operation: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, a, b: TensorHandle(operation(self, _widen(a), _widen(b)).data, tl.int1)


def _bounded(check: Callable[..., Any]) -> Callable[..., Any]:
    """The answer of `check`, which takes a dozen operations of the language for it."""

    def run(self: Any, a: Any, b: Any, operation: Callable[..., Any]) -> None:
        kind = a.type.scalar
        if kind.int_bitwidth >= 64:
            return
        exact = EXACT[operation.__name__](a.handle.data.astype(np.int64), b.handle.data.astype(np.int64))
        if exact.size and (exact.min() < kind.get_int_min_value() or exact.max() > kind.get_int_max_value()):
            raise OverflowError(f"int{kind.int_bitwidth} overflow in {operation.__name__}")

    return run


def _once(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` makes the language interpret, by looking through all of it, for each function that a kernel calls."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        languages = [value for value in self.fn.__globals__.values() if value is tl or value is tl.core]
        if any(tl.core.is_builtin(language.load) for language in languages):
            return call(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    return run


def _multiplied(dot: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, a: TensorHandle, b: TensorHandle, c: TensorHandle, precision: Any, *rest: Any) -> Any:
        narrow = _as_tf32 if "TF32" in str(precision).upper() and "X3" not in str(precision).upper() else _widen
        return dot(self, narrow(a), narrow(b), c, precision, *rest)

    return run


def _as_tf32(x: TensorHandle) -> TensorHandle:
    """fp32 with a mantissa of 10 bits, as tensor cores read it unless asked for "ieee"."""
    if x.dtype.scalar != tl.float32:
        return _widen(x)
    nearest = (np.ascontiguousarray(x.data).view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return TensorHandle(nearest.view(np.float32), x.dtype)


def _cast(cast: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, x: TensorHandle, kind: Any, *rounding: Any) -> Any:
        if kind.scalar == tl.bfloat16:
            return x if _is_bf16(x) else _round(x.data)
        wide = _widen(x)
        return wide if _is_bf16(x) and kind.scalar == tl.float32 else cast(self, wide, kind, *rounding)

    return run


def _wide_only(total: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, x: Any) -> Any:
        if x.dtype.is_bf16():
            raise TypeError("a GPU would add these bf16 numbers up in bf16: convert them to fp32 first")
        return total(self, x)

    return run


_TENSORS = np.zeros((0, 2), np.uint64)  # first byte and end of each tensor of the present launch, in order


def _remember_tensors(convert: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, args: Any, kwargs: Any) -> Any:
        global _TENSORS
        converted = convert(self, args, kwargs)
        storages = [t.untyped_storage() for t in _tensors((converted[0], list(converted[1].values())))]
        _TENSORS = np.array(sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages}), np.uint64).reshape(-1, 2)
        return converted

    return run


def _tensors(x: Any) -> list[Any]:
    if isinstance(x, (tuple, list)):
        return [tensor for item in x for tensor in _tensors(item)]
    x = getattr(x, "base", x)  # of a descriptor
    return [x] if hasattr(x, "untyped_storage") else []


def _checked(mask: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Refuses accesses outside the tensors of the launch; `mask` is the position of that operand."""

    def change(access: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, pointers: TensorHandle, *operands: Any) -> Any:
            given = operands[mask - 1]
            chosen = np.broadcast_to(getattr(given, "data", given) if isinstance(given, TensorHandle) else given, pointers.data.shape) != 0
            first = pointers.data[chosen]
            if first.size:
                size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
                place = np.searchsorted(_TENSORS[:, 0], first, side="right") - 1
                inside = (place >= 0) & (first + size <= _TENSORS[place.clip(0), 1]) if len(_TENSORS) else np.zeros(first.shape, bool)
                if not inside.all():
                    raise IndexError(f"{access.__name__} of {int((~inside).sum())} elements outside every tensor of the launch")
            return access(self, pointers, *operands)

        return run

    return change
