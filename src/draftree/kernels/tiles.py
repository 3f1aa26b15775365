"""Products of up to eight rows with 32 columns of a matrix, every sum one after the other: the heart of compiled layers.

The sums of a row are the same chain of operations for any number of rows beside it, so that its bits do not depend on the
width of a pass. They are held in registers while the matrix streams by, so over a few rows a product takes as long as the
matrix takes to be read. LLVM is told which vectors to use, as no loop of numba's becomes this code.

Shapes: m rows, k entries of a row, 32 columns.
"""

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.extending import intrinsic

from draftree.kernels.lanes import LANES, PARTS, PLACE, REAL, REALS, WORD, WORDS, Code

ROWS = 8
"""Rows of a tile at most; it has `COLUMNS`."""
BYTES = 128
"""Of a tile's 32 words, those of a matrix or the sums of a row."""
GROUP, OF_GROUP = 32, 5 * BYTES
"""Numbers of a group that have a step and a middle of their own, and the bytes of 32 columns' group: words of a step and a
middle in bfloat16, then four times words of eight numbers."""
FEW, SHORT, AHEAD = 4, 1024, 7168
"""Up to how many rows a processor finds out by itself what will be read, and bytes before they are read that a matrix's are
asked for: of so few rows, and of more. While a tile is computed, memory would otherwise rest; but what is asked for too soon
stands in the way of what few rows are about to read (docs/explanation/native-kernels.md)."""
NEAR = 2
"""How near to the processor they are put, of 0 … 3: into its second cache. A block does not fit into the first one beside its
rows, and passes over more than eight tokens, which read it several times, took a third longer when it was put there."""
_NUMBERS = ir.VectorType(ir.IntType(16), 2 * LANES)


class _Brain(ir.Type):  # type: ignore[misc]  # llvmlite is untyped
    """LLVM's type of a bfloat16, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Brain)

    def __hash__(self) -> int:
        return hash(_Brain)


def has_dots() -> bool:
    """True where the processor multiplies pairs of bfloat16."""
    return bool(binding.get_host_cpu_features().get("avx512bf16"))


DOTS = has_dots()


class _Code(Code):
    """Writes the code of one tile."""

    def prefetch(self, place: Any, size: int) -> None:
        """Asks for so many bytes that will be read soon."""
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), *[WORD] * 3])
        for line in range(0, size, 64):
            ahead = self.b.inttoptr(self.b.add(place, PLACE(line)), ir.IntType(8).as_pointer())
            self.b.call(self.function("llvm.prefetch.p0", kind), [ahead, WORD(0), WORD(NEAR), WORD(1)])

    def dotted(self, one: Any, other: Any, total: Any) -> Any:
        """The products of two pairs of bfloat16 for each number, added to it."""
        pairs = ir.VectorType(_Brain(), 2 * LANES)
        kind = ir.FunctionType(REALS, [REALS, pairs, pairs])
        dot = self.function("llvm.x86.avx512bf16.dpbf16ps.512", kind)
        return self.b.call(dot, [total, self.b.bitcast(one, pairs), self.b.bitcast(other, pairs)])

    def looked_up(self, words: Any, by: int) -> Any:
        """The numbers that lie in four bits of each half of words, as bfloat16; `by` says which four."""
        table = ir.Constant(_NUMBERS, [int(np.float32(i % 16).view(np.uint32)) >> 16 for i in range(2 * LANES)])
        halves = self.b.lshr(self.b.bitcast(words, _NUMBERS), ir.Constant(_NUMBERS, [4 * by] * (2 * LANES)))
        kind = ir.FunctionType(
            _NUMBERS, [_NUMBERS] * 2
        )  # which reads the lowest five bits of each, so the table is there twice
        found = self.b.call(self.function("llvm.x86.avx512.permvar.hi.512", kind), [table, halves])
        return self.b.bitcast(found, WORDS)

    def group(self, rows: list[Any], totals: list[Any], matrix: Any, sums: list[list[Any]]) -> list[list[Any]]:
        """The sums with a group of 32 numbers of each row, and of each column in four bits, added.

        Args:
            rows: the address of each row's group, of bfloat16.
            totals: that of the group's sum, a float32.
            matrix: that of the columns' steps and middles, behind which their numbers lie, eight a word.
            sums: of each row, by vectors.
        """
        scales = [self.at(matrix, WORDS, 4 * LANES * v) for v in PARTS]
        numbers = [[self.at(matrix, WORDS, BYTES * (1 + i) + 4 * LANES * v) for v in PARTS] for i in range(4)]
        less, found = ir.Constant(REALS, [-8.0] * LANES), []
        all_of = [self.all(self.at(place, REAL), REALS) for place in totals]
        within = [[self.b.fmul(total, less) for _ in PARTS] for total in all_of]
        for i in range(16):
            columns = [self.looked_up(word, i % 4) for word in numbers[i // 4]]
            words = [self.all(self.at(place, WORD, 4 * i), WORDS) for place in rows]
            within = [
                [self.dotted(word, w, s) for w, s in zip(columns, row, strict=True)]
                for word, row in zip(words, within, strict=True)
            ]
        for total, row, mine in zip(all_of, sums, within, strict=True):
            each = zip(scales, row, mine, strict=True)
            found.append([self.fused(self.lower(w), m, self.fused(self.upper(w), total, s)) for w, s, m in each])
        return found

    def step(self, kind: str, rows: list[Any], matrix: Any, sums: list[list[Any]]) -> list[list[Any]]:
        """The sums with one word of each row and of each column added.

        Args:
            kind: `pairs`: words hold two bfloat16, of rows and matrix; `reals`: a float32; `mixed`: a float32 of rows, and a
                bfloat16 of the matrix, half a word.
            rows: the address of each row's word.
            matrix: that of the columns'.
            sums: of each row, by vectors.
        """
        if kind == "mixed":
            columns = [self.numbers(matrix, v, True) for v in PARTS]
        else:
            columns = [self.at(matrix, WORDS, 4 * LANES * v) for v in PARTS]
        found = []
        for place, row in zip(rows, sums, strict=True):
            word = self.all(self.at(place, WORD), WORDS)
            if kind == "pairs" and DOTS:
                row = [self.dotted(word, w, s) for w, s in zip(columns, row, strict=True)]
            elif kind == "pairs":
                for half in (self.lower, self.upper):
                    row = [self.fused(half(word), half(w), s) for w, s in zip(columns, row, strict=True)]
            else:
                real = self.b.bitcast(word, REALS)
                row = [self.fused(real, self.b.bitcast(w, REALS), s) for w, s in zip(columns, row, strict=True)]
            found.append(row)
        return found


def _tile(kind: str, m: int, onward: bool) -> Any:
    """Adds the products of m rows with 32 columns.

    Args:
        kind: of the numbers, see `_Code.step`; `fours` of `_Code.group`.
        m: rows.
        onward: whether they are added to what is there, else to 0.

    Returns:
        A function of addresses and steps in bytes: of the rows, from one to the next; of the sums of their groups, for `fours`;
        of the matrix, from one word or group to the next; how many there are; of the sums; and of what will be read soon,
        which memory is asked for meanwhile.
    """

    def made(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, x_step, g, g_step, w, w_step, count, out, out_step, soon, soon_step = args
        builder.function.attributes.add("noinline")  # else every product compiles all tiles once more
        code, before = _Code(builder), builder.block
        loop, behind = builder.append_basic_block("words"), builder.append_basic_block("done")
        rows = [builder.add(x, builder.mul(x_step, PLACE(r))) for r in range(m)]
        places = [builder.add(out, builder.mul(out_step, PLACE(r))) for r in range(m)]
        none = ir.Constant(REALS, [0.0] * LANES)
        start = [[code.at(place, REALS, 4 * LANES * v) if onward else none for v in PARTS] for place in places]
        builder.branch(loop)
        builder.position_at_end(loop)
        i = builder.phi(PLACE)
        sums = [[builder.phi(REALS) for _ in PARTS] for _ in rows]
        column = builder.add(w, builder.mul(w_step, i))
        words = [builder.add(row, builder.mul(i, PLACE(2 * GROUP if kind == "fours" else 4))) for row in rows]
        if not onward:
            code.prefetch(builder.add(soon, builder.mul(soon_step, i)), OF_GROUP if kind == "fours" else BYTES)
        if kind == "fours":
            totals = [builder.add(builder.add(g, builder.mul(g_step, PLACE(r))), builder.mul(i, PLACE(4))) for r in range(m)]
            ends = code.group(words, totals, column, sums)
        else:
            ends = code.step(kind, words, column, sums)
        following = builder.add(i, PLACE(1))
        i.add_incoming(PLACE(0), before)
        i.add_incoming(following, loop)
        for phis, firsts, lasts in zip(sums, start, ends, strict=True):
            for phi, first, last in zip(phis, firsts, lasts, strict=True):
                phi.add_incoming(first, before)
                phi.add_incoming(last, loop)
        builder.cbranch(builder.icmp_signed("<", following, count), loop, behind)
        builder.position_at_end(behind)
        for place, lasts in zip(places, ends, strict=True):
            for v, last in enumerate(lasts):
                code.put(last, place, v, False)
        return context.get_dummy_value()

    kinds: Any = types
    whole = kinds.int64

    def typed(
        typing: Any, x: Any, x_step: Any, g: Any, g_step: Any, w: Any, w_step: Any, count: Any, out: Any, out_step: Any,
        soon: Any, soon_step: Any,
    ) -> Any:  # fmt: skip
        return kinds.void(*[whole] * 11), made

    return intrinsic(typed)


def _tiles(kind: str, onward: bool) -> Any:
    """As `_tile`, for any number of rows: behind the arguments of one."""
    t1, t2, t3, t4, t5, t6, t7, t8 = (_tile(kind, m, onward) for m in range(1, ROWS + 1))

    def few(
        x: Any, x_step: Any, g: Any, g_step: Any, w: Any, w_step: Any, count: Any, out: Any, out_step: Any,
        soon: Any, soon_step: Any, m: Any,
    ) -> None:  # fmt: skip
        if m == 1:
            t1(x, x_step, g, g_step, w, w_step, count, out, out_step, soon, soon_step)
        elif m == 2:
            t2(x, x_step, g, g_step, w, w_step, count, out, out_step, soon, soon_step)
        elif m == 3:
            t3(x, x_step, g, g_step, w, w_step, count, out, out_step, soon, soon_step)
        elif m == 4:
            t4(x, x_step, g, g_step, w, w_step, count, out, out_step, soon, soon_step)
        elif m == 5:
            t5(x, x_step, g, g_step, w, w_step, count, out, out_step, soon, soon_step)
        elif m == 6:
            t6(x, x_step, g, g_step, w, w_step, count, out, out_step, soon, soon_step)
        elif m == 7:
            t7(x, x_step, g, g_step, w, w_step, count, out, out_step, soon, soon_step)
        else:
            t8(x, x_step, g, g_step, w, w_step, count, out, out_step, soon, soon_step)

    return njit(nogil=True, forceinline=False)(few)


pairs, reals = _tiles("pairs", onward=False), _tiles("reals", onward=False)
"""Of words that hold two numbers of bfloat16, and of float32."""
fours = _tiles("fours" if DOTS else "pairs", onward=False)
"""Of bfloat16 with four bits, where the processor has what it takes."""
mixed_onward, reals_onward = _tiles("mixed", onward=True), _tiles("reals", onward=True)
"""Of float32 with bfloat16, and with float32, added to what is there."""
