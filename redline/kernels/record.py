"""A kernel's arguments: one struct, declared in its C++ source, which Python parses.

    decode/absorb.cu                             decode/absorb.py
    struct AbsorbLaunch {                        _Launch = launch_record("decode/absorb.cu", "AbsorbLaunch")
        const char* q;  // bf16 [T, H, N + P]    _Launch(q=q_THX, weight=..., absorbed=out, tokens=..., heads=...)
        ...
        int tokens, heads;                       The CPU's structs (`LinearCall`) are in cpu/core/kernels.h and next to
    };                                           the blocks; `native.function("linear")` takes their fields by keyword.

No argument is positional: all fields are given by name, and a tensor's dtype is checked against the pointer's type.
`layout_check` returns C++ text that a build appends to the source: it does not compile if sizes or offsets differ.
"""

import ctypes
import functools
import re
from array import array
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

# The dtypes that a pointer of each C type may point to; other types (char, void, u8) may point to any bytes.
_ELEMENTS: dict[str, tuple[torch.dtype, ...]] = {
    "float": (torch.float32,),
    "double": (torch.float64,),
    "bf16": (torch.bfloat16,),
    "u16": (torch.bfloat16, torch.float16, torch.int16, torch.uint16),
    "int": (torch.int32,),
    "int32_t": (torch.int32,),
    "u32": (torch.int32, torch.uint32),
    "int64_t": (torch.int64,),
    "i64": (torch.int64,),
    "u64": (torch.int64, torch.uint64),
    "uint8_t": (torch.uint8, torch.bool),
}
_SCALARS: dict[str, Any] = {
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "int": ctypes.c_int32,
    "int32_t": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
}
_C = {
    ctypes.c_float: torch.float32,
    ctypes.c_double: torch.float64,
    ctypes.c_int32: torch.int32,
    ctypes.c_int64: torch.int64,
}
_ARRAYS = {"f": torch.float32, "d": torch.float64, "i": torch.int32, "q": torch.int64}  # by typecode
_ANYTHING = ("void", "char")
_DTYPES = frozenset(value for value in vars(torch).values() if isinstance(value, torch.dtype))
_FIELD = re.compile(r"(?:const\s+)?(\w+)\s*([^;]*);")
_NAME = re.compile(r"((?:\*\s*(?:const\b)?\s*)*)(\w+)\s*$")


class ArgumentStruct(ctypes.Structure):
    """One call's arguments. Every field is given by name: a number, or for a pointer a tensor (contiguous, with the
    pointer's element type), an array of Python or ctypes (with the same rules), a record, an address, or None for null.

    Raises TypeError for a field that is missing, unknown, or of another element type, and for a tensor that is not
    contiguous. The record keeps references to its arguments; memory behind an address must outlive the call.
    """

    pointers: ClassVar[dict[str, str]] = {}  # field -> C type of its target

    def __init__(self, **values: Any) -> None:
        names = [name for name, *_ in self._fields_]
        missing, unknown = set(names) - set(values), set(values) - set(names)
        if missing or unknown:
            raise TypeError(f"{type(self).__name__}: missing {sorted(missing)}, unknown {sorted(unknown)}")
        plain = [self._plain(name, values[name]) for name in names]
        try:
            super().__init__(*plain)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}: {error}") from None
        self._given = values

    def _plain(self, name: str, value: Any) -> int | float:
        """A number or an address."""
        element, field = self.pointers.get(name), f"{type(self).__name__}.{name}"
        if isinstance(value, int | float):
            return value
        if element is None:
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise TypeError(f"{field} is a number, got {what}")
        if value is None:
            return 0
        held = _held(value)
        if not (held is None or held in accepted(element) or (isinstance(held, str) and element in _ANYTHING)):
            raise TypeError(f"{field} points to {element}, got {held}")
        if isinstance(value, Tensor):
            if not value.is_contiguous():
                strides, shape = value.stride(), tuple(value.shape)
                raise TypeError(f"{field}: expected a contiguous tensor, got strides {strides} for shape {shape}")
            return value.data_ptr()
        return value.buffer_info()[0] if isinstance(value, array) else ctypes.addressof(value)


def _held(value: Any) -> object:
    """The element type of a value: a dtype, a record's name, or None if it has neither."""
    if isinstance(value, Tensor):
        return value.dtype
    if isinstance(value, array):
        return _ARRAYS.get(value.typecode)
    kind: type = vars(type(value))["_type_"] if isinstance(value, ctypes.Array) else type(value)
    return kind.__name__ if issubclass(kind, ArgumentStruct) else _C.get(kind)


def accepted(element: str) -> frozenset[object]:
    """The values of `_held` that a pointer to this type accepts."""
    return frozenset(_ELEMENTS.get(element, (*_DTYPES, element)))


@functools.cache
def record(source: Path, name: str, base: type[ArgumentStruct] = ArgumentStruct) -> type[ArgumentStruct]:
    """The struct `name` of a C++ source. Raises LookupError if the source does not declare it, and ValueError for a
    field with an unknown type. base: the base class of the record."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", source.read_text(), flags=re.DOTALL)
    found = re.search(rf"\bstruct\s+{name}\s*\{{(.*?)\}}\s*;", text, re.DOTALL)
    if found is None:
        raise LookupError(f"{source.name} declares no struct {name}")
    fields: list[tuple[str, Any]] = []
    pointers: dict[str, str] = {}
    for kind, declared in _FIELD.findall(found[1]):
        for part in declared.split(","):
            named = _NAME.search(part)
            if named is None or (not named[1] and kind not in _SCALARS):
                raise ValueError(f"{source.name}: {name} has a field that is not understood: {kind} {part.strip()}")
            if named[1]:
                pointers[named[2]] = kind
            fields.append((named[2], ctypes.c_void_p if named[1] else _SCALARS[kind]))
    return type(name, (base,), {"_fields_": fields, "pointers": pointers})


def layout_check(kind: type[ctypes.Structure]) -> str:
    """C++ that does not compile if the compiler's layout of the struct differs from that of ctypes."""
    name = kind.__name__
    lines = [f'static_assert(sizeof({name}) == {ctypes.sizeof(kind)}, "the size of {name}");']
    for field, *_ in kind._fields_:
        at, size = getattr(kind, field).offset, getattr(kind, field).size
        lines.append(f'static_assert(__builtin_offsetof({name}, {field}) == {at}, "the place of {name}.{field}");')
        lines.append(f'static_assert(sizeof({name}::{field}) == {size}, "the size of {name}.{field}");')
    return "\n".join(lines) + "\n"
