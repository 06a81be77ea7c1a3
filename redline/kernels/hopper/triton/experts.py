# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Triton is typed by what it compiles, not by annotations.
"""Experts times the tokens that chose them, for many tokens, on chips without wgmma: the two products of
`prefill/grouped.py`, in its number formats. `tl.dot` becomes the matrix instruction of the chip.

A program multiplies ROWS rows of an expert by up to TOKENS tokens of a tile (`sort_pairs.py`). Programs of one tile are
adjacent: they read its tokens, and those of the same rows the same weights, from the L2 cache. The weights are unpacked
in registers from the records of `layouts/records.py`.

N rows of the weights, T tokens, C words of a row in a block of 64 inputs, E codes of a word.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.hopper.layouts.records import RecordForm, Records
from redline.kernels.hopper.prefill.sort_pairs import WIDEST, Sorted, most_tiles

UP_ROWS, DOWN_ROWS = 64, 128  # rows of a program; of up, as many of gate and of up. Every form has a multiple of them
H_SCALE = 1 / 16  # f16 h is stored divided by 16, as in grouped.cu


@triton.jit
def _record(expert, tile, part, TILES: tl.constexpr, PARTS: tl.constexpr, UP: tl.constexpr):
    """The number of a record in `Records.data`; int64 [N]."""
    if UP:
        return (expert * TILES + tile) * PARTS + part
    else:  # noqa: RET505: Triton compiles what follows a return
        return ((expert * (TILES // 4) + tile // 4) * PARTS + part) * 4 + tile % 4


@triton.jit
def _int4(words, halves, record, block, g, r, PART: tl.constexpr):
    """A block of 64 inputs of rows g + 8 r: f16 [N, 64]. words, halves: the records as int32 and as bf16."""
    c, e = tl.arange(0, 8), tl.arange(0, 8)
    at = record * (PART * 9 // 4) + block * 128 + 16 * g + r
    word_NC = tl.load(words + at[:, None] + (4 * (c % 4) + 2 * (c // 4))[None, :])
    code_NCE = ((word_NC[:, :, None] >> ((e % 2) * 16 + (e // 2) * 4)[None, None, :]) & 15) - 8
    at = record * (PART * 9 // 2) + 4 * PART + block * 32 + 4 * g + 2 * r
    scale_NC = tl.load(halves + at[:, None] + (c // 4)[None, :]).to(tl.float32)
    return tl.reshape((code_NCE.to(tl.float32) * scale_NC[:, :, None]).to(tl.float16), [g.shape[0], 64])


@triton.jit
def _nvfp4(words, octets, record, block, g, r, PART: tl.constexpr):
    """As `_int4`, without the matrix's scale. octets: the records as uint8."""
    c, e = tl.arange(0, 16), tl.arange(0, 4)
    at = record * ((PART * 9 + 16) // 4) + block * 128 + 16 * g
    word_NC = tl.load(words + at[:, None] + (4 * (c % 4) + c // 4)[None, :])
    half, pair = 16 * (e % 2), e // 2
    sign_NE = half[None, :] + 15 - pair[None, :] - r[:, None] * (3 - 2 * pair)[None, :]
    magnitude_NE = half[None, :] + 9 - 6 * pair[None, :] - 3 * r[:, None]
    sign_NCE = (word_NC[:, :, None] >> sign_NE[:, None, :]) & 1
    magnitude_NCE = (word_NC[:, :, None] >> magnitude_NE[:, None, :]) & 7
    # The bits of an e2m1 as those of a float32: the factor corrects the exponent's bias.
    value_NCE = ((sign_NCE << 31) | (magnitude_NCE << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    at = record * (PART * 9 + 16) + 8 * PART + block * 64 + 8 * g + 2 * r
    octet_NC = tl.load(octets + at[:, None] + (4 * (c // 8) + c // 4 % 2)[None, :]).to(tl.int32)
    unit_NC = (octet_NC << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120, from e4m3
    return tl.reshape((value_NCE * unit_NC[:, :, None]).to(tl.float16), [g.shape[0], 64])


@triton.jit
def _bf16(halves, record, block, g, r, PART: tl.constexpr):
    """As `_int4`, bf16."""
    k = tl.arange(0, 64)
    at = record * (16 * PART) + block * 1024 + (g + 8 * r) * 32
    return tl.load(halves + at[:, None] + (k // 32 * 512 + k % 32)[None, :])


@triton.jit
def _weights(words, halves, octets, record, block, g, r, KIND: tl.constexpr, PART: tl.constexpr):
    if KIND == "INT4":
        return _int4(words, halves, record, block, g, r, PART)
    elif KIND == "NVFP4":  # noqa: RET505: Triton compiles what follows a return
        return _nvfp4(words, octets, record, block, g, r, PART)
    else:
        return _bf16(halves, record, block, g, r, PART)


@triton.jit
def _matrix_scale(floats, record, r, PART: tl.constexpr):
    """NVFP4's scale of a whole matrix, of rows with r = 0 or 1: float32 [N]."""
    return tl.load(floats + record * ((PART * 9 + 16) // 4) + 9 * PART // 4 + r)


@triton.jit
def _tile(tiles, TURNS: tl.constexpr, TOKENS: tl.constexpr, ROW_BLOCKS: tl.constexpr):
    """This program's (expert, row block, first row of the columns, number of its rows, at most TOKENS)."""
    turn = tl.program_id(0) % TURNS
    block = tl.program_id(0) // TURNS % ROW_BLOCKS
    number = tl.program_id(0) // (TURNS * ROW_BLOCKS)
    at = tiles + 8 * (1 + number)
    width, inside = tl.load(at + 4), turn * TOKENS
    first = (number - tl.load(at + 1)) * width
    count = tl.minimum(tl.minimum(width, tl.load(at + 5) - first) - inside, TOKENS)
    count = tl.where(number < tl.load(tiles), count, 0)
    return tl.load(at).to(tl.int64), block, tl.load(at + 3) + first + inside, count


@triton.jit
def _clamped(x):
    return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)


@triton.jit
def _convert(x, rstd, out, x_stride, INPUTS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """out [T, WIDTH] = x, times rstd; f16 or bf16; zeros behind INPUTS."""
    token, k = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x_K = tl.load(x + token * x_stride + k, mask=k < INPUTS, other=0.0).to(tl.float32)
    if rstd is not None:
        x_K *= tl.load(rstd + token)
    if out.dtype.element_ty == tl.float16:
        tl.store(out + token * WIDTH + k, _clamped(x_K), mask=k < WIDTH)
    else:
        tl.store(out + token * WIDTH + k, x_K.to(tl.bfloat16), mask=k < WIDTH)


@triton.jit
def _up(x, words, halves, octets, floats, columns, tiles, h, KIND: tl.constexpr, CHOSEN: tl.constexpr,
        TILES: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, HIDDEN: tl.constexpr, TURNS: tl.constexpr,
        TOKENS: tl.constexpr, ROWS: tl.constexpr, H_SCALE: tl.constexpr):  # fmt: skip
    """h [R, HIDDEN] = silu(gate x) * up x, f16 times H_SCALE; bf16 for bf16 weights."""
    expert, block, first, count = _tile(tiles, TURNS, TOKENS, HIDDEN // ROWS)
    if count <= 0:
        return
    t, n, k = tl.arange(0, TOKENS), tl.arange(0, ROWS), tl.arange(0, 64)
    row = first + tl.minimum(t, count - 1).to(tl.int64)
    pair = tl.load(columns + 2 * row)
    token = tl.maximum(pair, 0).to(tl.int64) // CHOSEN  # a row without a pair has any token's x, and is not stored
    x_at = x + token[None, :] * (PARTS * PART) + k[:, None]
    tile, g, zero = block * (ROWS // 8) + n // 8, n % 8, 0 * n
    gate_NT = tl.zeros((ROWS, TOKENS), tl.float32)
    up_NT = tl.zeros((ROWS, TOKENS), tl.float32)
    for step in range(PARTS * (PART // 64)):
        record, inside = _record(expert, tile, step // (PART // 64), TILES, PARTS, True), step % (PART // 64)
        x_KT = tl.load(x_at + step * 64)
        gate_NT = tl.dot(_weights(words, halves, octets, record, inside, g, zero, KIND, PART), x_KT, gate_NT)
        up_NT = tl.dot(_weights(words, halves, octets, record, inside, g, zero + 1, KIND, PART), x_KT, up_NT)
    if KIND == "NVFP4":
        record = _record(expert, tile, 0, TILES, PARTS, True)
        gate_NT *= _matrix_scale(floats, record, zero, PART)[:, None]
        up_NT *= _matrix_scale(floats, record, zero + 1, PART)[:, None]
    h_NT = gate_NT / (1.0 + tl.exp(-gate_NT)) * up_NT
    h_NT = h_NT.to(tl.bfloat16) if KIND == "BF16" else _clamped(h_NT * H_SCALE)
    real = (pair >= 0) & (t < count)
    tl.store(h + row[None, :] * HIDDEN + (block * ROWS + n)[:, None], h_NT, mask=real[None, :])


@triton.jit
def _down(h, words, halves, octets, floats, columns, tiles, y, KIND: tl.constexpr, TILES: tl.constexpr,
          PARTS: tl.constexpr, PART: tl.constexpr, HIDDEN: tl.constexpr, TURNS: tl.constexpr, TOKENS: tl.constexpr,
          ROWS: tl.constexpr, H_SCALE: tl.constexpr):  # fmt: skip
    """y bf16 [pairs, 16 TILES]: each pair's row, times its weight; of 16 outputs, g and g + 8 are adjacent."""
    expert, block, first, count = _tile(tiles, TURNS, TOKENS, 16 * TILES // ROWS)
    if count <= 0:
        return
    t, n, k = tl.arange(0, TOKENS), tl.arange(0, ROWS), tl.arange(0, 64)
    row = first + tl.minimum(t, count - 1).to(tl.int64)
    pair = tl.load(columns + 2 * row)
    weight = tl.load(columns + 2 * row + 1, mask=pair >= 0, other=0).to(tl.float32, bitcast=True)
    # Rows without a pair, fewer than 8 at an expert's end, were not written. The first row of a program has a pair.
    h_at = h + tl.where(pair >= 0, row, first)[None, :] * HIDDEN + k[:, None]
    tile, g, r = block * (ROWS // 16) + n // 16, n % 16 // 2, n % 2
    y_NT = tl.zeros((ROWS, TOKENS), tl.float32)
    for step in range(HIDDEN // 64):
        record, inside = _record(expert, tile, step // (PART // 64), TILES, PARTS, False), step % (PART // 64)
        h_KT = tl.load(h_at + step * 64)
        y_NT = tl.dot(_weights(words, halves, octets, record, inside, g, r, KIND, PART), h_KT, y_NT)
    if KIND == "NVFP4":
        y_NT *= _matrix_scale(floats, _record(expert, tile, 0, TILES, PARTS, False), r, PART)[:, None]
    y_NT *= (weight if KIND == "BF16" else weight / H_SCALE)[None, :]
    real = (pair >= 0) & (t < count)
    y_at = y + pair.to(tl.int64)[None, :] * (16 * TILES) + (block * ROWS + n)[:, None]
    tl.store(y_at, y_NT.to(tl.bfloat16), mask=real[None, :])


def multiply(x_TD: Tensor, ids_TK: Tensor, order: Sorted, up: Records, down: Records, rstd_T: Tensor | None) -> Tensor:
    """The weighted y of each pair, bf16 [T K, D padded], in the order that `add_pairs` reads. As `GroupedExpertsArgs`.

    order: of `sort_pairs` for the ids.
    """
    (count, chosen), device = ids_TK.shape, x_TD.device
    pairs, hidden, dtype = count * chosen, down.form.width, torch.bfloat16 if up.kind == "BF16" else torch.float16
    x_shape, y_shape = (count, up.form.width), (pairs, 16 * down.form.tiles)
    x_size, y_size = math.prod(x_shape), math.prod(y_shape)
    room = torch.empty(max(x_size, y_size), dtype=torch.bfloat16, device=device)  # x is not read when y is written
    x, y = room[:x_size].view(dtype).view(x_shape), room[:y_size].view(y_shape)
    if not pairs:
        return y
    h = torch.empty(order.columns.shape[0], hidden, dtype=dtype, device=device)
    convert = {"INPUTS": up.inputs, "WIDTH": up.form.width, "COLUMNS": 1024}
    _convert[(count, triton.cdiv(up.form.width, 1024))](x_TD, rstd_T, x, x_TD.stride(0), **convert, num_warps=4)
    tokens = 16 if pairs <= 8 * up.experts else 64
    turns = WIDEST // tokens
    tiles = turns * most_tiles(pairs, up.experts)
    sizes = {"KIND": up.kind, "HIDDEN": hidden, "TURNS": turns, "TOKENS": tokens, "H_SCALE": H_SCALE}
    sizes |= {"num_warps": 4, "num_stages": 3}
    where = order.columns, order.tiles
    _up[(tiles * (hidden // UP_ROWS),)](
        *(x, *_views(up), *where, h), CHOSEN=chosen, ROWS=UP_ROWS, **_parts(up.form), **sizes
    )
    _down[(tiles * (16 * down.form.tiles // DOWN_ROWS),)](
        *(h, *_views(down), *where, y), ROWS=DOWN_ROWS, **_parts(down.form), **sizes
    )
    return y


def _parts(form: RecordForm) -> dict[str, int]:
    """TILES, and PARTS records of PART inputs each along K."""
    return {"TILES": form.tiles, "PARTS": form.slices * form.parts, "PART": form.part}


def _views(records: Records) -> tuple[Tensor, ...]:
    """The records as int32, bf16, uint8 and float32."""
    return tuple(records.data.view(dtype) for dtype in (torch.int32, torch.bfloat16, torch.uint8, torch.float32))
