"""A kernel's arguments: one struct, declared in its C++ source, and read from there by Python.

    linear.h                                     linear.py
    struct LinearArgs {                          LinearArgs = record(HERE / "linear.h", "LinearArgs")
        const float* x;  // [T, K]               LinearArgs(x=x_TK, tokens=x_TK.shape[0])
        int tokens;
    };

So nothing agrees by position: fields are given by name, all of them, and a tensor's dtype is held against the pointer's
type. `layout_check` is C++ text that a build appends to the source: it does not compile where sizes or offsets differ.
"""

import ctypes
import functools
import re
from array import array
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

# What a pointer of each C type may point to; a name that is missing here (char, void, u8) points to any bytes.
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
_ELEMENTS_OF_ARRAYS = {"i": "int32_t", "q": "int64_t", "f": "float", "d": "double"}  # by typecode
_NUMBERS = frozenset((int, float, bool))
_FIELD = re.compile(r"(?:const\s+)?(\w+)\s*([^;]*);")
_NAME = re.compile(r"((?:\*\s*(?:const\b)?\s*)*)(\w+)\s*$")


class Record(ctypes.Structure):
    """One call's arguments. Every field is given, by name: a number, or for a pointer a tensor (contiguous, of the
    pointer's element type), an array of Python's likewise, another record, an address, or None for null.

    Raises TypeError for a field that is missing, unknown, or of another element type, and for a tensor that is not
    contiguous. The record keeps what it was given; what an address points to has to outlive the call.
    """

    pointers: ClassVar[dict[str, str]] = {}  # field -> C type of what it points to
    names: ClassVar[tuple[str, ...]] = ()  # of the fields, in order

    def __init__(self, **values: Any) -> None:
        try:
            plain = [
                value if type(value := values[name]) in _NUMBERS else self._address(name, value) for name in self.names
            ]
        except KeyError:
            plain = []
        if len(plain) != len(values):
            missing, unknown = set(self.names) - set(values), set(values) - set(self.names)
            raise TypeError(f"{type(self).__name__}: missing {sorted(missing)}, unknown {sorted(unknown)}")
        super().__init__(*plain)
        self.given = values

    def _address(self, name: str, value: Any) -> int:
        element = self.pointers.get(name)
        if element is None:
            raise TypeError(f"{type(self).__name__}.{name} is a number, got {type(value).__name__}")
        if value is None:
            return 0
        if isinstance(value, Tensor):
            allowed = _ELEMENTS.get(element)
            if allowed is not None and value.dtype not in allowed:
                raise TypeError(f"{type(self).__name__}.{name} points to {element}, got {value.dtype}")
            if not value.is_contiguous():
                raise TypeError(
                    f"{type(self).__name__}.{name}: expected a contiguous tensor, got strides {value.stride()} for "
                    f"shape {tuple(value.shape)}"
                )
            return value.data_ptr()
        if isinstance(value, array):
            if element != _ELEMENTS_OF_ARRAYS.get(value.typecode):
                raise TypeError(f"{type(self).__name__}.{name} points to {element}, got array({value.typecode!r})")
            return value.buffer_info()[0]
        if isinstance(value, Record) and type(value).__name__ != element:
            raise TypeError(f"{type(self).__name__}.{name} points to {element}, got {type(value).__name__}")
        return ctypes.addressof(value)


@functools.cache
def record(source: Path, name: str) -> type[Record]:
    """The struct `name` of a C++ source. Raises LookupError where the source declares none, and ValueError for a field
    whose type is not known here."""
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
    names = tuple(field for field, _ in fields)
    return type(name, (Record,), {"_fields_": fields, "pointers": pointers, "names": names})


def layout_check(kind: type[ctypes.Structure]) -> str:
    """C++ that does not compile where the compiler lays the struct out otherwise than ctypes does."""
    name = kind.__name__
    lines = [f'static_assert(sizeof({name}) == {ctypes.sizeof(kind)}, "the size of {name}");']
    for field, *_ in kind._fields_:
        at = getattr(kind, field).offset
        lines.append(f'static_assert(__builtin_offsetof({name}, {field}) == {at}, "the place of {name}.{field}");')
    return "\n".join(lines) + "\n"
