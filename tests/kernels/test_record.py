"""A struct of a C++ source, read by Python: which declarations are understood, and which values a field accepts."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from redline.kernels.cpu import native
from redline.kernels.record import ArgumentStruct, layout_check, record

SOURCE = """
// struct Row { int commented_out; };
typedef unsigned int u32;
struct Other { float* x; };
struct Row {
    const float* x;      // [T, K]; not y
    /* int gone;
       int gone_too; */
    u32 tokens, stride;  // two of them; and a comment with a semicolon;
    float *y, *const z;
    const char* const* names;
    const int** rows;
    const double eps;
    long long* sums;
    int last;
};
"""
PLACES = {
    "x": 0,
    "tokens": 8,
    "stride": 12,
    "y": 16,
    "z": 24,
    "names": 32,
    "rows": 40,
    "eps": 48,
    "sums": 56,
    "last": 64,
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "row.h"
    path.write_text(SOURCE)
    return path


def declared(tmp_path: Path, fields: str) -> type[ArgumentStruct]:
    path = tmp_path / "given.h"
    path.write_text(f"struct Given {{ {fields} }};")
    return record(path, "Given")


def values(**others: object) -> dict[str, object]:
    return {**dict.fromkeys(PLACES, 0), **others}


def test_fields_lie_where_the_source_declares_them(source: Path):
    row = record(source, "Row")
    assert {name: getattr(row, name).offset for name, *_ in row._fields_} == PLACES
    assert ctypes.sizeof(row) == 72
    assert row.pointers == {"x": "float", "y": "float", "z": "float", "names": "char", "rows": "int", "sums": "long"}
    assert [name for name, *_ in record(source, "Other")._fields_] == ["x"]


def test_numbers_and_addresses_arrive(source: Path):
    x, other = torch.ones(3), record(source, "Other")(x=None)
    row = record(source, "Row")(**values(x=x, names=other, rows=None, tokens=2**32 - 1, eps=0.1, last=-7))
    assert (row.x, row.names, row.rows) == (x.data_ptr(), ctypes.addressof(other), None)
    assert (row.tokens, row.stride, row.eps, row.last) == (2**32 - 1, 0, 0.1, -7)


def test_a_source_without_the_struct_is_named(source: Path):
    with pytest.raises(LookupError, match="declares no struct Column"):
        record(source, "Column")


@pytest.mark.parametrize("fields", ["half x;", "int x[4];", "Other x;", "int n; bool x;"])
def test_a_field_that_is_not_understood_is_named(tmp_path: Path, fields: str):
    with pytest.raises(ValueError, match=r"Given has a field that is not understood: .* x"):
        declared(tmp_path, fields)


def test_a_field_that_is_missing_or_unknown_is_named(source: Path):
    row = record(source, "Row")
    given = values()
    del given["stride"], given["y"]
    with pytest.raises(TypeError, match=r"Row: missing \['stride', 'y'\], unknown \[\]"):
        row(**given)
    with pytest.raises(TypeError, match=r"Row: missing \[\], unknown \['pages'\]"):
        row(**values(pages=1))
    with pytest.raises(TypeError, match=r"Row: missing \['last'\], unknown \['lats'\]"):
        row(**{("lats" if name == "last" else name): 0 for name in PLACES})


def test_a_tensor_of_another_type_is_refused(source: Path):
    row, x = record(source, "Row"), torch.ones(4, 2)
    for name, given, said in (
        ("x", x.double(), "Row.x points to float, got torch.float64"),
        ("rows", x, "Row.rows points to int, got torch.float32"),
        ("x", x.T, "Row.x: expected a contiguous tensor"),
        ("tokens", x, "Row.tokens is a number, got a tensor"),
    ):
        with pytest.raises(TypeError, match=said):
            row(**values(**{name: given}))


@pytest.mark.skipif(native.find_compiler() is None, reason="needs a C++ compiler")
def test_a_compiler_agrees_about_the_layout_or_refuses_it(tmp_path: Path, source: Path):
    def compiles(check: str) -> bool:
        path = tmp_path / "check.cpp"
        path.write_text(f'#include "{source}"\n{check}')
        command = [str(native.find_compiler()), "-std=c++17", "-fsyntax-only", str(path)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    assert compiles(layout_check(record(source, "Row")))
    other = tmp_path / "other.h"
    other.write_text(SOURCE.replace("u32 tokens, stride;", "u32 stride, tokens;"))
    assert not compiles(layout_check(record(other, "Row")))
    other.write_text(SOURCE.replace("int last;", "int last; i64 more;"))
    record.cache_clear()
    assert not compiles(layout_check(record(other, "Row")))
