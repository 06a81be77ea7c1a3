"""Small bugs that could be written into a source: an operator turned round, a number off by one, a statement left out.

`mutants(root, file)` finds all of a file, in its order. Python is read by `ast`; C++ and CUDA line by line, as the
compiler sees them for the emulator. Text that nobody computes with is left alone: messages, annotations, comments.
"""

import ast
import hashlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_COMPARE = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "is not": "is", "is": "is not", "not in": "in", "in": "not in",
}  # fmt: skip
_ARITHMETIC = {"+": "-", "-": "+", "*": "+", "//": "*", "/": "*", "%": "*", "<<": ">>", ">>": "<<", "&": "|", "|": "&"}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}
_TENSOR_CALLS = {"detach", "clone", "contiguous", "clamp", "clamp_", "strip", "copy"}  # dropped from a chain
_MAKES_INPUTS = re.compile(
    r"^_?(random_|example$|cases$|.*_cases$)"
)  # make inputs for tests and timing: a bug there proves nothing
_NO_RESULT = {"strict", "frozen", "timeout"}  # keywords that a right program gives the same answers with or without
_SAYS = re.compile(r"^_?(log|logger|console)$")

CPP = {".cpp", ".h", ".cu", ".cuh"}


class Mutant(NamedTuple):
    """`before` stands at bytes [start, end) of the file, and `after` is written in its place. line: counted from 1."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    before: str
    after: str
    text: str  # the line as it was

    @property
    def id(self) -> str:
        """The file and a hash of the line's text, not of its number: it survives changes elsewhere in the file."""
        column = f"{self.kind} {self.before} {self.after} {self.text}"
        return f"{self.file}:{hashlib.sha256(column.encode()).hexdigest()[:12]}"

    def apply(self, source: bytes) -> bytes:
        """The source with the bug in it. Raises AssertionError where `before` is not at its place any more."""
        assert source[self.start : self.end] == self.before.encode(), f"{self.file}:{self.line} has changed"
        return source[: self.start] + self.after.encode() + source[self.end :]

    def diff(self, source: bytes) -> str:
        """The line or lines with "-" before each, then what becomes of them with "+".

        Raises AssertionError as `apply` does.
        """
        begin = source.rfind(b"\n", 0, self.start) + 1
        stop = source.find(b"\n", self.end)
        new = self.apply(source)
        grown = len(new) - len(source)
        old_text, new_text = source[begin:stop].decode(), new[begin : stop + grown].decode()
        return "\n".join(
            [*(f"-{line}" for line in old_text.split("\n")), *(f"+{line}" for line in new_text.split("\n"))]
        )


def mutants(root: Path, file: str) -> list[Mutant]:
    """All mutants of a file, in its order, each with an id of its own: of two that read the same the first one counts.

    file: relative to `root`. Raises OSError where it cannot be read, and SyntaxError for Python that does not parse.
    """
    source = (root / file).read_bytes()
    found = _in_cpp(file, source) if Path(file).suffix in CPP else _in_python(file, source)
    return list({mutant.id: mutant for mutant in reversed(list(found))}.values())[::-1]


# -- Python --------------------------------------------------------------------------------------------------------


class _Place:
    """Bytes of a source by line and column."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file = file
        self.source = source
        self.lines = source.split(b"\n")
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line) + 1)

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def dot(self, value: ast.expr) -> int:
        """The byte at which the dot of an attribute stands, behind its value and its brackets."""
        return self.source.index(b".", self.end(value))

    def mutant(self, kind: str, start: int, end: int, after: str) -> Mutant:
        line = self.source.count(b"\n", 0, start)
        before = self.source[start:end].decode()
        return Mutant(self.file, line + 1, kind, start, end, before, after, self.lines[line].decode())

    def between(self, kind: str, start: int, end: int, table: dict[str, str]) -> Iterator[Mutant]:
        """Yields the mutant of the operator in bytes [start, end), between two operands, where `table` has it."""
        text = self.source[start:end].decode()
        code = re.sub(r"#[^\n]*", lambda comment: " " * len(comment[0].encode()), text)
        if found := re.search(r"[^\s()\\]+(?: +(?:not|in))?", code):
            operator = re.sub(r" +", " ", found[0])
            if operator in table:
                at = start + len(code[: found.start()].encode())
                yield self.mutant(kind, at, at + len(found[0].encode()), table[operator])


def _in_python(file: str, source: bytes) -> Iterator[Mutant]:
    place = _Place(file, source)
    for node in _computed(ast.parse(source)):
        yield from _of(node, place)


def _computed(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes that the program computes with."""
    yield node
    if isinstance(node, ast.FunctionDef) and _MAKES_INPUTS.match(node.name):
        return
    for name, value in ast.iter_fields(node):
        children = [child for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)]
        if name in ("annotation", "returns"):
            # A bound in an annotation, such as Meta(ge=0), decides something: it is computed with.
            calls = [one for child in children for one in ast.walk(child) if isinstance(one, ast.Call)]
            children = [keyword.value for call in calls for keyword in call.keywords]
        if name == "decorator_list" or (name == "msg" and isinstance(node, ast.Assert)):
            continue
        for child in children:
            if not _is_said(child) and not (isinstance(child, ast.keyword) and child.arg in _NO_RESULT):
                yield from _computed(child)


def _is_said(node: ast.AST) -> bool:
    """Whether a node is a message, or decided before anything runs."""
    match node:
        case ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.Raise():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return bool(_SAYS.match(name))
        case ast.Call(func=ast.Attribute(attr="Option" | "Argument" | "add_argument")):
            return True
        case ast.Assign(targets=[ast.Name(id="__slots__" | "__all__")]):
            return True
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return True
        case _:
            return False


def _of(node: ast.AST, place: _Place) -> Iterator[Mutant]:
    match node:
        case ast.Compare(left=left, comparators=comparators):
            for first, second in zip([left, *comparators], comparators, strict=False):
                yield from place.between("compare", place.end(first), place.start(second), _COMPARE)
        case ast.BinOp(left=left, right=right) if not _is_text(left) and not _is_text(right):
            yield from place.between("arithmetic", place.end(left), place.start(right), _ARITHMETIC)
        case ast.BoolOp(values=values):
            for first, second in itertools.pairwise(values):
                yield from place.between("logic", place.end(first), place.start(second), {"and": "or", "or": "and"})
        case ast.UnaryOp(op=ast.Not()):
            yield place.mutant("not", place.start(node), place.start(node) + len("not"), "")
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield place.mutant("minus", place.start(node), place.start(node) + len("-"), "")
        case ast.Constant(value=bool() as value):
            yield place.mutant("flag", place.start(node), place.end(node), str(not value))
        case ast.Constant(value=int() as value):
            yield place.mutant("off by one", place.start(node), place.end(node), str(value + 1))
            if value > 1:
                yield place.mutant("off by one", place.start(node), place.end(node), str(value - 1))
        case ast.Constant(value=float() as value) if value:
            yield place.mutant("number", place.start(node), place.end(node), repr(value * 2))
        case ast.Call(func=ast.Name(id=name) as function) if name in _CALLS:
            yield place.mutant("function", place.start(function), place.end(function), _CALLS[name])
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in _CALLS:
            dot = place.dot(value)
            yield place.mutant("function", dot, dot + 1 + len(name), f".{_CALLS[name]}")
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in _TENSOR_CALLS:
            yield place.mutant("dropped call", place.dot(value), place.end(node), "")
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Continue() | ast.Break():
            yield place.mutant("dropped", place.start(node), place.end(node), "pass")
        case _:
            pass


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


# -- C++ and CUDA --------------------------------------------------------------------------------------------------

_TOKENS: tuple[tuple[str, str], ...] = (
    (r" (<|<=|>|>=|==|!=) ", "compare"),
    (r" ([+\-*/%]) ", "arithmetic"),
    (r" (&&|\|\|) ", "logic"),
    (r" ([+\-*|])= ", "arithmetic"),
    (r"(?<![\w.\"'<])(\d+)(?![\w.\"'>])", "off by one"),
    (r"\b(f?min|f?max)(?=f?\()", "function"),
    (r"(?<=[ (])(!)(?=[a-z])", "not"),
)
_CPP = {
    **_COMPARE, "+": "-", "-": "+", "*": "+", "/": "*", "%": "/", "&&": "||", "||": "&&", "|": "&", "!": "",
    "min": "max", "max": "min", "fmin": "fmax", "fmax": "fmin",
}  # fmt: skip
_DECLARES = re.compile(r"^\s*(#|//|\*|template|extern|static_assert|typedef|using|namespace|asm|\")|__launch_bounds__")
_STATEMENT = re.compile(
    r"^\s+(?!return\b|const\b|case\b|break\b|auto\b|[\w:<>]+ \w+\()([\w.\->\[\]]+(?: [+\-*|]?= |\().*;)\s*(?://.*)?$"
)


def _in_cpp(file: str, source: bytes) -> Iterator[Mutant]:
    start = 0
    for number, (line, seen) in enumerate(_seen(source.decode()), 1):
        code = re.sub(r"//.*", lambda comment: " " * len(comment[0]), line)
        code = re.sub(r'"[^"]*"', lambda text: '"' * len(text[0]), code)
        if seen and not _DECLARES.search(line):
            for pattern, kind in _TOKENS:
                for found in re.finditer(pattern, code):
                    before = found[1]
                    after = str(int(before) + 1) if kind == "off by one" else _CPP[before]
                    at = start + len(line[: found.start(1)].encode())
                    yield Mutant(file, number, kind, at, at + len(before.encode()), before, after, line)
            if statement := _STATEMENT.match(code.rstrip()):
                at = start + len(line[: statement.start(1)].encode())
                text = line[statement.start(1) : statement.end(1)]
                yield Mutant(file, number, "dropped", at, at + len(text.encode()), text, ";", line)
        start += len(line.encode()) + 1


def _seen(source: str) -> Iterator[tuple[str, bool]]:
    """Lines, and whether the compiler sees them where a kernel is emulated."""
    stack: list[bool] = []
    for line in source.split("\n"):
        word = re.match(r"\s*#\s*(\w+)\s*(.*)", line)
        match word and word[1]:
            case "ifdef":
                stack.append(True)
            case "ifndef":
                stack.append(word is not None and "REDLINE_EMULATE" not in word[2])
            case "if":
                stack.append(word is not None and "__CUDA" not in word[2])
            case "else" if stack:
                stack[-1] = not stack[-1]
            case "endif" if stack:
                stack.pop()
            case _:
                pass
        yield line, all(stack)
