"""A kernel's arguments: one struct, declared in its C++ source, and read from there by Python.

    linear.cpp                                   linear.py
    struct LinearArgs {                          LinearArgs = record(HERE / "linear.cpp", "LinearArgs")
        const float* x;  // [T, K]               LinearArgs(x=x_TK, tokens=x_TK.shape[0])
        int tokens;
    };

So nothing agrees by position: fields are given by name, all of them, and a tensor's dtype is held against the pointer's
type. `layout_check` is C++ text that a build appends to the source: it does not compile where sizes or offsets differ.
"""

import ctypes
import functools
import re
import struct
from array import array
from collections.abc import Callable
from ctypes import addressof
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


class Record(ctypes.Structure):
    """One call's arguments. Every field is given, by name: a number, or for a pointer a tensor (contiguous, of the
    pointer's element type), an array of Python's or of C's (likewise), another record, an address, or None for null.

    Raises TypeError for a field that is missing, unknown, or of another element type, and for a tensor that is not
    contiguous. The record keeps what it was given; what an address points to has to outlive the call.
    """

    pointers: ClassVar[dict[str, str]] = {}  # field -> C type of what it points to
    _names: ClassVar[tuple[str, ...]] = ()
    _accepted: ClassVar[tuple[tuple[int, frozenset[object]], ...]] = ()  # of each pointer, its place and what it takes
    _packer: ClassVar[Callable[..., bytes]] = struct.Struct("").pack

    def __init__(self, **values: Any) -> None:
        plain = self._plain(values)
        try:
            super().__init__(*plain)
        except TypeError as error:
            raise self._refusal(plain, error) from None
        self._given = values

    @classmethod
    def bytes_of(cls, values: dict[str, Any]) -> bytes:
        """Those of the record of `values`, which are made sooner than it: for a call that is made now."""
        plain = cls._plain(values)
        try:
            return cls._packer(*plain)
        except (TypeError, struct.error) as error:
            raise cls._refusal(plain, error) from None

    @classmethod
    def _plain(cls, values: dict[str, Any]) -> list[Any]:
        """Each field's number or address, in order. What is no number is found out where it is made one."""
        plain = list(values.values()) if tuple(values) == cls._names else cls._in_order(values)
        for at, accepted in cls._accepted:
            value = plain[at]
            kind = type(value)
            if kind is Tensor and value.dtype in accepted and value.is_contiguous():
                plain[at] = value.data_ptr()
            elif value is None:
                plain[at] = 0
            elif kind is array and _ARRAYS.get(value.typecode) in accepted:
                plain[at] = value.buffer_info()[0]
            elif kind is not int:
                plain[at] = addressof(value) if _held(kind) in accepted else cls._address(at, value, accepted)
        return plain

    @classmethod
    def _in_order(cls, values: dict[str, Any]) -> list[Any]:
        missing, unknown = set(cls._names) - set(values), set(values) - set(cls._names)
        if missing or unknown:
            raise TypeError(f"{cls.__name__}: missing {sorted(missing)}, unknown {sorted(unknown)}")
        return [values[name] for name in cls._names]

    @classmethod
    def _address(cls, at: int, value: Any, accepted: frozenset[object]) -> int:
        """The address of a tensor of a subclass, or of a record where the pointer is to anything; no other is taken."""
        field, element = f"{cls.__name__}.{cls._names[at]}", cls.pointers[cls._names[at]]
        if isinstance(value, Record) and element in _ANYTHING:
            return addressof(value)
        given = value.dtype if isinstance(value, Tensor) else _held(type(value))
        if given not in accepted:
            raise TypeError(f"{field} points to {element}, got {given}")
        if not value.is_contiguous():
            strides, shape = value.stride(), tuple(value.shape)
            raise TypeError(f"{field}: expected a contiguous tensor, got strides {strides} for shape {shape}")
        return value.data_ptr()

    @classmethod
    def _refusal(cls, plain: list[Any], error: Exception) -> TypeError:
        """Where a number is none, or is of another kind than its field."""
        for name, value in zip(cls._names, plain, strict=True):
            if not isinstance(value, int | float):
                what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                return TypeError(f"{cls.__name__}.{name} is a number, got {what}")
        return TypeError(f"{cls.__name__}: {error}")


@functools.cache
def _held(kind: type) -> object:
    """What an array of C holds: a dtype, a record's name, or None where it may be anything. A record's own name."""
    if not issubclass(kind, ctypes.Array):
        return kind.__name__
    of: type = vars(kind)["_type_"]
    return of.__name__ if issubclass(of, Record) else _C.get(of)


def _taken_by(element: str) -> frozenset[object]:
    """What a pointer to these takes, in the words of `_held`."""
    return frozenset((*_ELEMENTS.get(element, (*_DTYPES, element)), None))


@functools.cache
def record(source: Path, name: str, base: type[Record] = Record) -> type[Record]:
    """The struct `name` of a C++ source. Raises LookupError where the source declares none, and ValueError for a field
    whose type is not known here. base: what its record is a kind of."""
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
    members = {
        "_fields_": fields,
        "_names": names,
        "pointers": pointers,
        "_accepted": tuple((names.index(field), _taken_by(element)) for field, element in pointers.items()),
        "_packer": struct.Struct("".join(kind._type_ for _, kind in fields)).pack,
    }
    return type(name, (base,), members)


def layout_check(kind: type[ctypes.Structure]) -> str:
    """C++ that does not compile where the compiler lays the struct out otherwise than ctypes does."""
    name = kind.__name__
    lines = [f'static_assert(sizeof({name}) == {ctypes.sizeof(kind)}, "the size of {name}");']
    for field, *_ in kind._fields_:
        at, size = getattr(kind, field).offset, getattr(kind, field).size
        lines.append(f'static_assert(__builtin_offsetof({name}, {field}) == {at}, "the place of {name}.{field}");')
        lines.append(f'static_assert(sizeof({name}::{field}) == {size}, "the size of {name}.{field}");')
    return "\n".join(lines) + "\n"
