# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Triton is typed by what it compiles, not by annotations.
"""Experts times the tokens that chose them, for many tokens, on chips without wgmma: the two products of
`prefill/grouped.py`, in its number formats. `tl.dot` becomes the matrix instruction of the chip.

A program multiplies N rows of an expert by one to three bunches of T tokens of a tile (`sort_pairs.py`). Programs of a
tile are adjacent: they read its tokens, and those of the same rows the same weights, from the L2 cache. The weights are
unpacked in registers from the records of `layouts/records.py`, once for all tokens of the program.

Inputs are in the order in which a lane's values are a matrix instruction's a operand, so no lane needs another's: of 64
INT4 inputs, k = 32h + 8t + 2p + b is at 32h + 8p + 2t + b; of 32 NVFP4 inputs, k = 16q + 4t + 2p + b is at 16q + 8p +
2t + b. x and h are stored in this order.

N rows of the weights: of each record its eight rows with r = 0, then those with r = 1. T tokens.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.cuda.layouts.records import RecordForm, Records
from redline.kernels.cuda.prefill.sort_pairs import WIDEST, Sorted, most_tiles

ROWS = 64  # N of a program. Every form has a multiple of them
STAGES = 4  # of the ring in shared memory: at most 131 KB, 98 for mma.sync
H_SCALE = 1 / 16  # f16 h is stored divided by 16, as in grouped.cu


@triton.jit
def _halves(bits):
    """The two f16 of an int32."""
    low, high = bits.to(tl.int16), (bits >> 16).to(tl.int16)
    return low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)


@triton.jit
def _int4(word, scale, N: tl.constexpr):
    """A block of 64 inputs: f16 [N, 64]. word: int32 [record, g, t, half, r]. scale: pairs of bf16 [record, g, r]."""
    RECORDS: tl.constexpr = N // 16
    word, pair = tl.reshape(word, [RECORDS, 8, 4, 2, 2, 1]), tl.arange(0, 4)
    low, high = _halves(((word >> (4 * pair)) & 0x000F000F) | 0x64006400)  # 1024 + code
    scale = tl.join(scale << 16, scale & -65536).to(tl.float32, bitcast=True).to(tl.float16)
    scale = tl.reshape(tl.permute(tl.reshape(scale, [RECORDS, 8, 2, 2]), 0, 1, 3, 2), [RECORDS, 8, 1, 2, 2, 1])
    value = tl.join((low - 1032.0) * scale, (high - 1032.0) * scale)
    return tl.reshape(tl.permute(value, 0, 4, 1, 3, 5, 2, 6), [N, 64])


@triton.jit
def _nvfp4(word, scale, N: tl.constexpr):
    """As `_int4`, without the matrix's scale. word: [record, g, t, q]. scale: e4m3 [record, g, half], bytes [r, q]."""
    RECORDS: tl.constexpr = N // 16
    word = tl.reshape(word, [RECORDS, 8, 4, 4, 1, 1])
    r, pair, q = tl.arange(0, 2)[:, None], tl.arange(0, 2)[None, :], tl.arange(0, 2)[:, None]
    # The bits of an e2m1 as those of an f16 are 2^-14 of its value, those of an e4m3 2^-8.
    sign, magnitude = (word << (3 * r + pair - 2 * r * pair)) & -0x7FFF8000, (word << (6 * pair + 3 * r)) & 0x0E000E00
    low, high = _halves(sign | magnitude)
    octet = (tl.reshape(scale, [RECORDS, 8, 2, 1, 1]) >> (16 * tl.arange(0, 2)[None, :] + 8 * q)) & 255
    unit = (octet << 7).to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    unit = tl.reshape(unit, [RECORDS, 8, 1, 4, 2, 1])
    value = tl.join(low * 16384.0 * unit, high * 16384.0 * unit)
    return tl.reshape(tl.permute(value, 0, 4, 1, 3, 5, 2, 6), [N, 64])


@triton.jit
def _weights(words, halves, record, offset, block, KIND: tl.constexpr, PART: tl.constexpr, N: tl.constexpr):
    """A block of 64 inputs of N rows, f16 or bf16 [N, 64]. words, halves: the records as int32 and as bf16. record: of
    each 16 rows, [N / 16]; offset: that of this step."""
    RECORDS: tl.constexpr = N // 16
    if KIND == "BF16":
        n, k = tl.arange(0, N), tl.arange(0, 64)
        at = tl.reshape(tl.broadcast_to(record[:, None], [RECORDS, 16]), [N]) * (16 * PART) + n % 16 * 32
        here = offset * (16 * PART) + block * 1024
        return tl.load(halves + at[:, None] + (k // 32 * 512 + k % 32)[None, :] + here)
    else:
        SIZE: tl.constexpr = PART * 9 // 4 if KIND == "INT4" else (PART * 9 + 16) // 4
        at, here = record * SIZE, offset * SIZE
        lane, word, sixteen = tl.arange(0, 32), tl.arange(0, 4), tl.arange(0, 16)
        word_at = at[:, None, None] + 4 * lane[None, :, None] + word[None, None, :] + (here + block * 128)
        scale = tl.load(words + 2 * PART + (at[:, None] + sixteen[None, :]) + (here + block * 16))
        if KIND == "INT4":
            return _int4(tl.load(words + word_at), scale, N)
        else:
            return _nvfp4(tl.load(words + word_at), scale, N)


@triton.jit
def _matrix_scale(floats, record, r, PART: tl.constexpr):
    """NVFP4's scale of a whole matrix, of rows with r = 0 or 1."""
    return tl.load(floats + record * ((PART * 9 + 16) // 4) + 9 * PART // 4 + r)


@triton.jit
def _reordered(x, KIND: tl.constexpr, WHOLE: tl.constexpr, T: tl.constexpr):
    """[WHOLE, T] inputs in the order of the products."""
    if KIND == "INT4":
        return tl.reshape(tl.permute(tl.reshape(x, [WHOLE // 32, 4, 4, 2, T]), 0, 2, 1, 3, 4), [WHOLE, T])
    elif KIND == "NVFP4":
        return tl.reshape(tl.permute(tl.reshape(x, [WHOLE // 16, 4, 2, 2, T]), 0, 2, 1, 3, 4), [WHOLE, T])
    else:
        return x


@triton.jit
def _tile(tiles, TURNS: tl.constexpr, TOKENS: tl.constexpr, ROW_BLOCKS: tl.constexpr):
    """This program's (expert, row block, first row of the columns, number of its rows, at most TOKENS).

    `sort_pairs` divides an expert's rows into tiles of equal width. Here as many tiles are cut anew: all have WIDEST
    rows (TURNS x TOKENS) except the last, so that the fewest bunches are multiplied.
    """
    turn = tl.program_id(0) % TURNS
    block = tl.program_id(0) // TURNS % ROW_BLOCKS
    number = tl.program_id(0) // (TURNS * ROW_BLOCKS)
    at = tiles + 8 * (1 + number)
    first = (number - tl.load(at + 1)) * (TURNS * TOKENS) + turn * TOKENS
    count = tl.where(number < tl.load(tiles), tl.minimum(tl.load(at + 5) - first, TOKENS), 0)
    return tl.load(at).to(tl.int64), block, tl.load(at + 3) + first, count


@triton.jit
def _clamped(x):
    return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)


@triton.jit
def _convert(x, rstd, out, x_stride, KIND: tl.constexpr, INPUTS: tl.constexpr, WIDTH: tl.constexpr,
             COLUMNS: tl.constexpr):  # fmt: skip
    """out [T, WIDTH] = x, times rstd; f16 or bf16, reordered; zeros behind INPUTS."""
    token, k = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x_K = tl.load(x + token * x_stride + k, mask=k < INPUTS, other=0.0).to(tl.float32)
    if rstd is not None:
        x_K *= tl.load(rstd + token)
    x_K = x_K.to(tl.bfloat16) if KIND == "BF16" else _clamped(x_K)
    x_K = tl.reshape(_reordered(tl.reshape(x_K, [COLUMNS, 1]), KIND, COLUMNS, 1), [COLUMNS])
    tl.store(out + token * WIDTH + k, x_K, mask=k < WIDTH)


@triton.jit
def _rows(columns, first, count, bunch: tl.constexpr, T: tl.constexpr):
    """Of one bunch of tokens: rows of the columns, their pairs, and whether each is to be stored. Rows behind the last
    repeat it, so all can be read."""
    t = bunch * T + tl.arange(0, T)
    row = first + tl.minimum(t, count - 1).to(tl.int64)
    pair = tl.load(columns + 2 * row)
    return row, pair, (t < count) & (pair >= 0)


@triton.jit
def _products(at_0, at_1, at_2, words, halves, record, KIND: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
              STRIDE: tl.constexpr, N: tl.constexpr, T: tl.constexpr, BUNCHES: tl.constexpr):  # fmt: skip
    """The rows times one to three bunches of tokens, float32 [N, T] each. at_0 ..: pointers to inputs [64, T].
    STRIDE: records from one part of the inputs to the next."""
    BLOCKS: tl.constexpr = PART // 64
    sum_0, sum_1, sum_2 = tl.zeros((N, T), tl.float32), tl.zeros((N, T), tl.float32), tl.zeros((N, T), tl.float32)
    for step in range(PARTS * BLOCKS):
        a_NK = _weights(words, halves, record, step // BLOCKS * STRIDE, step % BLOCKS, KIND, PART, N)
        sum_0 = tl.dot(a_NK, tl.load(at_0 + step * 64), sum_0)
        if BUNCHES > 1:
            sum_1 = tl.dot(a_NK, tl.load(at_1 + step * 64), sum_1)
        if BUNCHES > 2:
            sum_2 = tl.dot(a_NK, tl.load(at_2 + step * 64), sum_2)
    return sum_0, sum_1, sum_2


@triton.jit
def _x_at(x, columns, first, count, bunch: tl.constexpr, CHOSEN: tl.constexpr, WIDTH: tl.constexpr, T: tl.constexpr):
    _, pair, _ = _rows(columns, first, count, bunch, T)  # a row without a pair has any token's x, and is not stored
    token = tl.maximum(pair, 0).to(tl.int64) // CHOSEN
    return x + token[None, :] * WIDTH + tl.arange(0, 64)[:, None]


@triton.jit
def _store_h(sum_NT, gate_scale, up_scale, h_at, columns, first, count, bunch: tl.constexpr, KIND: tl.constexpr,
             HIDDEN: tl.constexpr, N: tl.constexpr, T: tl.constexpr, H_SCALE: tl.constexpr):  # fmt: skip
    """h_at: pointers to the values [N / 2] of row 0."""
    row, _, real = _rows(columns, first, count, bunch, T)
    gate, up = tl.split(tl.permute(tl.reshape(sum_NT, [N // 16, 2, 8, T]), 0, 2, 3, 1))
    gate, up = gate * gate_scale, up * up_scale
    h_IT = tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, [N // 2, T])
    h_IT = h_IT.to(tl.bfloat16) if KIND == "BF16" else _clamped(h_IT * H_SCALE)
    tl.store(h_at[:, None] + row[None, :] * HIDDEN, _reordered(h_IT, KIND, N // 2, T), mask=real[None, :])


@triton.jit
def _up_tile(x, words, halves, floats, columns, h, expert, block, first, count, KIND: tl.constexpr,
             CHOSEN: tl.constexpr, TILES: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, HIDDEN: tl.constexpr,
             T: tl.constexpr, N: tl.constexpr, H_SCALE: tl.constexpr, BUNCHES: tl.constexpr):  # fmt: skip
    WIDTH: tl.constexpr = PARTS * PART
    record = (expert * TILES + block * (N // 16) + tl.arange(0, N // 16)) * PARTS
    at_0 = _x_at(x, columns, first, count, 0, CHOSEN, WIDTH, T)
    at_1 = _x_at(x, columns, first, count, 1, CHOSEN, WIDTH, T) if BUNCHES > 1 else at_0
    at_2 = _x_at(x, columns, first, count, 2, CHOSEN, WIDTH, T) if BUNCHES > 2 else at_0
    sum_0, sum_1, sum_2 = _products(at_0, at_1, at_2, words, halves, record, KIND, PARTS, PART, 1, N, T, BUNCHES)
    gate_scale, up_scale = 1.0, 1.0
    if KIND == "NVFP4":
        gate_scale = _matrix_scale(floats, expert * TILES * PARTS, 0, PART)
        up_scale = _matrix_scale(floats, expert * TILES * PARTS, 1, PART)
    h_at = h + block * (N // 2) + tl.arange(0, N // 2)
    _store_h(sum_0, gate_scale, up_scale, h_at, columns, first, count, 0, KIND, HIDDEN, N, T, H_SCALE)
    if BUNCHES > 1:
        _store_h(sum_1, gate_scale, up_scale, h_at, columns, first, count, 1, KIND, HIDDEN, N, T, H_SCALE)
    if BUNCHES > 2:
        _store_h(sum_2, gate_scale, up_scale, h_at, columns, first, count, 2, KIND, HIDDEN, N, T, H_SCALE)


@triton.jit
def _up(x, words, halves, floats, columns, tiles, h, KIND: tl.constexpr, CHOSEN: tl.constexpr, TILES: tl.constexpr,
        PARTS: tl.constexpr, PART: tl.constexpr, HIDDEN: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
        H_SCALE: tl.constexpr, BUNCHES: tl.constexpr, TURNS: tl.constexpr):  # fmt: skip
    """h [R, HIDDEN] = silu(gate x) * up x, f16 times H_SCALE, reordered; bf16 for bf16 weights."""
    expert, block, first, count = _tile(tiles, TURNS, BUNCHES * T, HIDDEN // (N // 2))
    if count <= 0:
        return
    if (BUNCHES > 2) & (count > 2 * T):
        _up_tile(x, words, halves, floats, columns, h, expert, block, first, count, KIND, CHOSEN, TILES, PARTS, PART,
                 HIDDEN, T, N, H_SCALE, 3)  # fmt: skip
    elif (BUNCHES > 1) & (count > T):
        _up_tile(x, words, halves, floats, columns, h, expert, block, first, count, KIND, CHOSEN, TILES, PARTS, PART,
                 HIDDEN, T, N, H_SCALE, 2)  # fmt: skip
    else:
        _up_tile(x, words, halves, floats, columns, h, expert, block, first, count, KIND, CHOSEN, TILES, PARTS, PART,
                 HIDDEN, T, N, H_SCALE, 1)  # fmt: skip


@triton.jit
def _h_at(h, columns, first, count, bunch: tl.constexpr, HIDDEN: tl.constexpr, T: tl.constexpr):
    # Rows without a pair, fewer than 8 at an expert's end, were not written. The first row of a program has a pair.
    row, pair, _ = _rows(columns, first, count, bunch, T)
    return h + tl.where(pair >= 0, row, first)[None, :] * HIDDEN + tl.arange(0, 64)[:, None]


@triton.jit
def _store_y(sum_NT, scale, y_at, columns, first, count, bunch: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr,
             T: tl.constexpr):  # fmt: skip
    """y_at: pointers to the values [N] of pair 0."""
    row, pair, real = _rows(columns, first, count, bunch, T)
    weight = tl.load(columns + 2 * row + 1).to(tl.float32, bitcast=True)
    y_NT = (sum_NT * (weight * scale)[None, :]).to(tl.bfloat16)
    y_NT = tl.reshape(tl.permute(tl.reshape(y_NT, [N // 16, 2, 8, T]), 0, 2, 1, 3), [N, T])
    tl.store(y_at[:, None] + pair.to(tl.int64)[None, :] * WIDTH, y_NT, mask=real[None, :])


@triton.jit
def _down_tile(h, words, halves, floats, columns, y, expert, block, first, count, KIND: tl.constexpr,
               TILES: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, HIDDEN: tl.constexpr, T: tl.constexpr,
               N: tl.constexpr, H_SCALE: tl.constexpr, BUNCHES: tl.constexpr):  # fmt: skip
    tile = block * (N // 16) + tl.arange(0, N // 16)
    record = (expert * (TILES // 4) + tile // 4) * (4 * PARTS) + tile % 4
    at_0 = _h_at(h, columns, first, count, 0, HIDDEN, T)
    at_1 = _h_at(h, columns, first, count, 1, HIDDEN, T) if BUNCHES > 1 else at_0
    at_2 = _h_at(h, columns, first, count, 2, HIDDEN, T) if BUNCHES > 2 else at_0
    sum_0, sum_1, sum_2 = _products(at_0, at_1, at_2, words, halves, record, KIND, PARTS, PART, 4, N, T, BUNCHES)
    scale = 1.0 if KIND == "BF16" else 1.0 / H_SCALE
    if KIND == "NVFP4":
        scale *= _matrix_scale(floats, expert * TILES * PARTS, 0, PART)
    y_at = y + block * N + tl.arange(0, N)
    _store_y(sum_0, scale, y_at, columns, first, count, 0, 16 * TILES, N, T)
    if BUNCHES > 1:
        _store_y(sum_1, scale, y_at, columns, first, count, 1, 16 * TILES, N, T)
    if BUNCHES > 2:
        _store_y(sum_2, scale, y_at, columns, first, count, 2, 16 * TILES, N, T)


@triton.jit
def _down(h, words, halves, floats, columns, tiles, y, KIND: tl.constexpr, TILES: tl.constexpr, PARTS: tl.constexpr,
          PART: tl.constexpr, HIDDEN: tl.constexpr, T: tl.constexpr, N: tl.constexpr, H_SCALE: tl.constexpr,
          BUNCHES: tl.constexpr, TURNS: tl.constexpr):  # fmt: skip
    """y bf16 [pairs, 16 TILES]: each pair's row, times its weight; of 16 outputs, g and g + 8 are adjacent."""
    expert, block, first, count = _tile(tiles, TURNS, BUNCHES * T, 16 * TILES // N)
    if count <= 0:
        return
    if (BUNCHES > 2) & (count > 2 * T):
        _down_tile(h, words, halves, floats, columns, y, expert, block, first, count, KIND, TILES, PARTS, PART, HIDDEN,
                   T, N, H_SCALE, 3)  # fmt: skip
    elif (BUNCHES > 1) & (count > T):
        _down_tile(h, words, halves, floats, columns, y, expert, block, first, count, KIND, TILES, PARTS, PART, HIDDEN,
                   T, N, H_SCALE, 2)  # fmt: skip
    else:
        _down_tile(h, words, halves, floats, columns, y, expert, block, first, count, KIND, TILES, PARTS, PART, HIDDEN,
                   T, N, H_SCALE, 1)  # fmt: skip


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
    convert = {"KIND": up.kind, "INPUTS": up.inputs, "WIDTH": up.form.width, "COLUMNS": 1024}
    _convert[(count, triton.cdiv(up.form.width, 1024))](x_TD, rstd_T, x, x_TD.stride(0), **convert, num_warps=4)
    tokens, bunches = _bunches(pairs, up.experts)
    turns = WIDEST // (tokens * bunches)
    tiles = turns * most_tiles(pairs, up.experts)
    sizes = {"KIND": up.kind, "HIDDEN": hidden, "T": tokens, "N": ROWS, "H_SCALE": H_SCALE, "BUNCHES": bunches}
    sizes |= {"TURNS": turns, "num_warps": 4, "num_stages": STAGES}
    where = order.columns, order.tiles
    _up[(tiles * (hidden // (ROWS // 2)),)](*(x, *_views(up), *where, h), CHOSEN=chosen, **_parts(up.form), **sizes)
    _down[(tiles * (16 * down.form.tiles // ROWS),)](*(h, *_views(down), *where, y), **_parts(down.form), **sizes)
    return y


def _bunches(pairs: int, experts: int) -> tuple[int, int]:
    """Tokens of a bunch, and at most how many a program multiplies. On an H200 with Kimi K2.6's experts 32 tokens are
    faster for up to 24 of each expert on average."""
    return (32, 1) if pairs <= 24 * experts else (64, 3)


def _parts(form: RecordForm) -> dict[str, int]:
    """TILES, and PARTS records of PART inputs each along K."""
    return {"TILES": form.tiles, "PARTS": form.slices * form.parts, "PART": form.part}


def _views(records: Records) -> tuple[Tensor, ...]:
    """The records as int32, bf16 and float32."""
    return tuple(records.data.view(dtype) for dtype in (torch.int32, torch.bfloat16, torch.float32))
