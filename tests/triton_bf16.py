"""Triton's interpreter keeps bf16 as raw 16-bit integers and computes with those; this module makes it compute with
their values.

Seen in Triton 3.6 to 3.9: products and sums of bf16 are off by orders of magnitude, float32 is truncated instead of
rounded, and an integer becomes the bf16 of those bits.
Seen in Triton 3.7: float32 that rounds up to the next power of two becomes half of it as e4m3.

Seen in Triton 3.7: it searches all of `triton.language`, to patch it, whenever a kernel calls a function, which took a
third of the time of tests of small kernels. Here it does so once for each kernel that runs.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    """Rounded to the nearest bf16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    nearest = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), nearest)


def mend() -> None:
    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    convert = builder.create_fp_to_fp
    cast, dot, binary, unary = builder.cast_impl, builder.create_dot, builder.binary_op, builder.unary_op

    def is_bf16(x: Any) -> bool:
        return x.dtype.scalar == tl.bfloat16

    def float32(x: Any) -> Any:
        return handle(widened(x.data), tl.float32) if is_bf16(x) else x

    def mended_cast(self: Any, source: Any, to: Any) -> Any:
        if is_bf16(source) and to.scalar == tl.float32:
            return float32(source)
        if source.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            return handle(rounded(source.data), tl.bfloat16)
        if source.dtype.scalar.is_int() and to.scalar == tl.bfloat16:
            return handle(rounded(source.data.astype(np.float32)), tl.bfloat16)
        return cast(self, source, to)

    def mended_convert(self: Any, source: Any, to: Any, mode: Any) -> Any:
        if source.dtype.scalar == tl.float32 and to.scalar == tl.float8e4nv:
            bits = torch.from_numpy(source.data).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
            return handle(bits, tl.float8e4nv)
        return convert(self, source, to, mode)

    def mended_binary(self: Any, left: Any, right: Any, op: Any) -> Any:
        bits = op.__name__.startswith(("bitwise", "left_", "right_"))
        if bits or not (is_bf16(left) and is_bf16(right)):
            return binary(self, left, right, op)
        result = op(widened(left.data), widened(right.data))
        return handle(result, tl.int1) if result.dtype == bool else handle(rounded(result), tl.bfloat16)

    def mended_unary(self: Any, x: Any, op: Any) -> Any:
        return handle(rounded(op(widened(x.data))), tl.bfloat16) if is_bf16(x) else unary(self, x, op)

    def mended_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return dot(self, float32(a), float32(b), d, *rest)

    builder.cast_impl, builder.create_dot = mended_cast, mended_dot
    builder.binary_op, builder.unary_op = mended_binary, mended_unary
    builder.create_fp_to_fp = mended_convert
    patch_once()


def patch_once() -> None:
    if not hasattr(interpreter, "_LangPatchScope"):  # a version that records its patches differently
        return
    patch = interpreter._patch_lang
    patched: set[int] = set()  # modules patched for the kernel that runs

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            if self._changes:
                patched.clear()
            super().restore()

    def patch_lang(fn: Any) -> Any:
        modules = {id(each) for each in fn.__globals__.values() if each is tl or each is tl.core}
        if modules and modules <= patched:
            return Scope()  # nothing to restore
        scope = patch(fn)
        patched.update(modules)
        return scope

    interpreter._LangPatchScope, interpreter._patch_lang = Scope, patch_lang
