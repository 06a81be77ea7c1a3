"""Arithmetic on paper: one fixed procedure per operation, each line computable from the tokens just before it.

Digits are single tokens. Operands are padded to one width so that columns align, a column shows its whole sum, and the
result grows by one digit in front per line, so the answer is in the end a copy and never a memory.
"""

from typing import NamedTuple


class Worked(NamedTuple):
    """A calculation written line by line, as the model thinks it."""

    lines: list[str]  # the last one is `= RESULT`
    result: int


def add(a: int, b: int, width: int = 0) -> Worked:
    """7+6+0=13 -> 3, carry 1: digit + digit + carry, then the digits so far and the new carry."""
    width = max(len(str(a)), len(str(b)), width)
    top, bottom = f"{a:0{width}d}", f"{b:0{width}d}"
    lines = [f"{top} + {bottom}"]
    carry, done = 0, ""
    for x, y in zip(reversed(top), reversed(bottom), strict=True):
        total = int(x) + int(y) + carry
        done = f"{total % 10}{done}"
        lines.append(f"{x}+{y}+{carry}={total} -> {done}, carry {total // 10}")
        carry = total // 10
    lines.append(f"= {a + b}")
    return Worked(lines, a + b)


def subtract(a: int, b: int) -> Worked:
    """6-7-0=-1 -> 9, borrow 1. The larger number goes on top; the sign is settled first."""
    width = max(len(str(a)), len(str(b)))
    top, bottom = f"{a:0{width}d}", f"{b:0{width}d}"
    lines = [f"{top} - {bottom}"]
    if a < b:
        lines.append(f"{top} < {bottom}, so minus ({bottom} - {top})")
        top, bottom = bottom, top
    else:
        lines.append(f"{top} >= {bottom}")
    borrow, done = 0, ""
    for x, y in zip(reversed(top), reversed(bottom), strict=True):
        left = int(x) - int(y) - borrow
        done = f"{left % 10}{done}"
        lines.append(f"{x}-{y}-{borrow}={left} -> {done}, borrow {int(left < 0)}")
        borrow = int(left < 0)
    lines.append(f"= {a - b}")
    return Worked(lines, a - b)


def _times_digit(a: int, digit: int, row: bool) -> list[str]:
    """A product with one digit. As a row of a larger product it keeps its last carry, even zero, so that rows align."""
    lines = [f"{a} * {digit}"]
    carry, done = 0, ""
    for x in reversed(str(a)):
        product = int(x) * digit
        total = product + carry
        done = f"{total % 10}{done}"
        lines.append(f"{x}*{digit}={product}, +{carry}={total} -> {done}, carry {total // 10}")
        carry = total // 10
    lines.append(f"= {carry}{done}" if row else f"= {a * digit}")
    return lines


def multiply(a: int, b: int) -> Worked:
    """One row per digit of the shorter number, from the right; rows are added as they come."""
    if len(str(a)) < len(str(b)):
        a, b = b, a
    if b < 10:
        return Worked(_times_digit(a, b, row=False), a * b)
    lines = [f"{a} * {b}"]
    total = 0
    for place, digit in enumerate(reversed(str(b))):
        lines += _times_digit(a, int(digit), row=True)
        row = a * int(digit) * 10**place
        if place:
            lines += add(total, row, width=len(str(a)) + 1 + place).lines
        total += row
    return Worked(lines, a * b)


def divide(a: int, b: int) -> Worked:
    """Long division. First the multiples of b; then per digit: what is there, the largest multiple in it, the rest.

    The rest is subtracted column by column, units first, as in `subtract`, then written in order. `left` are the
    digits still to bring down.
    """
    width = len(str(10 * b - 1))  # the most that can be there: a rest below b and one digit more
    multiples = [f"{digit}:{digit * b:0{width}d}" for digit in range(10)]
    lines = [f"{a} / {b}", " ".join(multiples)]
    digits = str(a)
    start = min(len(str(b)), len(digits))
    rest, done = int(digits[:start]), ""
    for position in range(start - 1, len(digits)):
        if position >= start:
            rest = rest * 10 + int(digits[position])
        quotient = rest // b
        left = f"{rest - quotient * b:0{width}d}"
        columns, borrow = list[str](), 0
        for x, y in zip(reversed(f"{rest:0{width}d}"), reversed(f"{quotient * b:0{width}d}"), strict=True):
            below = int(x) - int(y) - borrow
            columns.append(f"{x}-{y}-{borrow}={below} -> {below % 10}")
            borrow = int(below < 0)
        done += str(quotient)
        lines.append(
            f"{rest:0{width}d}: {multiples[quotient]}, rest {', '.join(columns)} = {left} -> {done}"
            f", left {digits[position + 1 :] or 'none'}"
        )
        rest -= quotient * b
    lines.append(f"= {a // b}" + (f" remainder {rest}" if rest else ""))
    return Worked(lines, a // b)


WORK = {"add": add, "sub": subtract, "mul": multiply, "div": divide}
