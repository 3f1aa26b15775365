"""What compiled layers do between their products, sixteen numbers at a time: norms, gates, scores and their exponentials.

numba's own loops become such code only where LLVM can tell that what is written is not what is read, which within a whole layer
it cannot. Every number is the same chain of operations wherever it lies.

Shapes: a tile's row has 32 numbers; W entries of a row.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES, COLUMNS = 16, 32
"""Numbers of a vector; processors with narrower ones take several. And those of a tile's row."""
PARTS = range(COLUMNS // LANES)
BIT, WORD, PLACE, REAL, LONG = ir.IntType(1), ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()
WORDS, REALS, HALVES, LONGS, BITS = (ir.VectorType(kind, LANES) for kind in (WORD, REAL, ir.IntType(16), LONG, BIT))
HIDDEN, LEAST, MOST = -3e38, -126.0, 126.0
"""A score that no key has; exponents of 2 below which a weight is 0, and beyond which this one is taken."""
LOG2E = 1.4426950408889634
POWER = (0.00015403530, 0.0013333558, 0.0096181291, 0.055504109, 0.24022651, 0.69314718, 1.0)
"""2^y on [−½, ½] as a polynomial, the highest power first, to some 10⁻⁷."""


def reals(value: float) -> Any:
    """A vector of one number that is known."""
    return ir.Constant(REALS, [float(np.float32(value))] * LANES)


def words(value: int) -> Any:
    """A vector of one word that is known."""
    return ir.Constant(WORDS, [value] * LANES)


class Code:
    """Writes code for vectors.

    Args:
        builder: of the function that it is written into.
    """

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def at(self, place: Any, kind: Any, offset: int = 0) -> Any:
        """What lies at an address."""
        place = self.b.add(place, PLACE(offset)) if offset else place
        return self.b.load(self.b.inttoptr(place, kind.as_pointer()), align=2)

    def write(self, value: Any, place: Any, offset: int = 0) -> None:
        """Lets a value lie at an address."""
        place = self.b.add(place, PLACE(offset)) if offset else place
        self.b.store(value, self.b.inttoptr(place, value.type.as_pointer()), align=2)

    def all(self, value: Any, kind: Any) -> Any:
        """A vector of one number."""
        nothing = ir.Constant(kind, ir.Undefined)
        one = self.b.insert_element(nothing, value, WORD(0))
        return self.b.shuffle_vector(one, nothing, ir.Constant(WORDS, [0] * LANES))

    def function(self, name: str, kind: Any) -> Any:
        """One of LLVM's."""
        tools: Any = cgutils  # untyped
        return tools.get_or_insert_function(self.b.module, kind, name)

    def fused(self, one: Any, other: Any, total: Any) -> Any:
        """one · other + total, rounded once."""
        kind = ir.FunctionType(REALS, [REALS] * 3)
        return self.b.call(self.function("llvm.fma.v16f32", kind), [one, other, total])

    def lower(self, pairs: Any) -> Any:
        """The bfloat16 in the lower halves of words."""
        return self.b.bitcast(self.b.shl(pairs, words(16)), REALS)

    def upper(self, pairs: Any) -> Any:
        """Those in the upper halves."""
        return self.b.bitcast(self.b.and_(pairs, words(0xFFFF0000)), REALS)

    def widened(self, halves: Any) -> Any:
        """Numbers of bfloat16 as float32."""
        return self.lower(self.b.zext(halves, WORDS))

    def numbers(self, place: Any, v: int, half: bool) -> Any:
        """A row's vector of that number, of bfloat16 or float32."""
        return self.widened(self.at(place, HALVES, 2 * LANES * v)) if half else self.at(place, REALS, 4 * LANES * v)

    def few(self, place: Any, count: Any, v: int, half: bool) -> tuple[Any, Any]:
        """The same of a row of so many numbers, and which of them there are; the others are not looked at."""
        kind, size = (HALVES, 2) if half else (REALS, 4)
        lanes = ir.Constant(WORDS, list(range(LANES * v, LANES * (v + 1))))
        there = self.b.icmp_signed("<", lanes, self.all(self.b.trunc(count, WORD), WORDS))
        name = f"llvm.masked.load.v{LANES}{'i16' if half else 'f32'}.p0"
        load = self.function(name, ir.FunctionType(kind, [kind.as_pointer(), WORD, BITS, kind]))
        address = self.b.inttoptr(self.b.add(place, PLACE(size * LANES * v)), kind.as_pointer())
        found = self.b.call(load, [address, WORD(size), there, ir.Constant(kind, [0] * LANES)])
        return (self.widened(found) if half else found), there

    def rounded(self, value: Any, half: bool) -> Any:
        """Numbers as they are once they were written; of bfloat16 the nearest ones, of two the even one."""
        if not half:
            return value
        bits = self.b.bitcast(value, WORDS)
        odd = self.b.and_(self.b.lshr(bits, words(16)), words(1))
        near = self.b.add(bits, self.b.add(odd, words(0x7FFF)))
        none = self.b.fcmp_unordered("uno", value, value)  # its upper half, with a bit that keeps it from becoming infinite
        kept = self.b.select(none, self.b.or_(bits, words(0x00400000)), near)
        return self.b.bitcast(self.b.and_(kept, words(0xFFFF0000)), REALS)

    def put(self, value: Any, place: Any, v: int, half: bool) -> None:
        """Writes a row's vector."""
        if half:
            bits = self.b.lshr(self.b.bitcast(self.rounded(value, half), WORDS), words(16))
            self.write(self.b.trunc(bits, HALVES), place, 2 * LANES * v)
        else:
            self.write(value, place, 4 * LANES * v)

    def larger(self, one: Any, other: Any) -> Any:
        """The larger ones; the first where one of them is no number."""
        return self.b.select(self.b.fcmp_ordered("<", one, other), other, one)

    def largest(self, value: Any) -> Any:
        """The largest number of a vector."""
        for apart in (8, 4, 2, 1):
            turned = ir.Constant(WORDS, [(i + apart) % LANES for i in range(LANES)])
            value = self.larger(value, self.b.shuffle_vector(value, value, turned))
        return self.b.extract_element(value, WORD(0))

    def power(self, x: Any) -> Any:
        """2^x for exponents of a normal number."""
        floor = self.function("llvm.floor.v16f32", ir.FunctionType(REALS, [REALS]))
        whole = self.b.call(floor, [self.b.fadd(x, reals(0.5))])
        y, p = self.b.fsub(x, whole), reals(POWER[0])
        for factor in POWER[1:]:
            p = self.fused(p, y, reals(factor))
        exponent = self.b.add(self.b.fptosi(whole, WORDS), words(127))
        return self.b.fmul(p, self.b.bitcast(self.b.shl(exponent, words(23)), REALS))


def _of_vectors(result: Any, given: str, body: Callable[..., Any]) -> Any:
    """A function of addresses and numbers whose body is written for vectors.

    Args:
        result: what it returns, a type of numba's.
        given: a letter for each argument: `a` address or count, `r` float32.
        body: given a `Code` and the arguments.
    """
    kinds: Any = types

    def made(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = body(Code(builder), *args)
        return context.get_dummy_value() if found is None else found

    kind = result(*(kinds.int64 if letter == "a" else kinds.float32 for letter in given)), made
    counted = {  # numba looks at the names
        2: lambda typing, a, b: kind,
        3: lambda typing, a, b, c: kind,
        5: lambda typing, a, b, c, d, e: kind,
    }
    return intrinsic(counted[len(given)])


def _kind(body: Callable[..., Any], half: bool, code: Code, *args: Any) -> Any:
    return body(code, half, *args)


_NOTHING, _SINGLE, _DOUBLE, _YES = (getattr(types, name) for name in ("void", "float32", "float64", "boolean"))


def _both(result: Any, given: str, body: Callable[..., Any]) -> tuple[Any, Any]:
    """Such a function for rows of bfloat16, and one for float32: the body is also told which."""
    half, real = (_of_vectors(result, given, partial(_kind, body, kind)) for kind in (True, False))
    return half, real


def _add(code: Code, half: bool, sums: Any, before: Any, out: Any) -> None:
    for v in PARTS:
        made = code.rounded(code.numbers(sums, v, False), half)
        code.put(code.b.fadd(code.numbers(before, v, half), made), out, v, half)


def _gate(code: Code, half: bool, gates: Any, ups: Any, out: Any) -> None:
    for v in PARTS:
        x, up = (code.rounded(code.numbers(place, v, False), half) for place in (gates, ups))
        z = code.larger(code.b.fmul(x, reals(-LOG2E)), reals(-MOST))
        z = code.b.select(code.b.fcmp_ordered(">", z, reals(MOST)), reals(MOST), z)
        opened = code.rounded(code.b.fdiv(x, code.b.fadd(reals(1), code.power(z))), half)
        code.put(code.b.fmul(opened, up), out, v, half)


def _see(code: Code, half: bool, mask: Any, count: Any, lowest: Any) -> Any:
    found = []
    for v in PARTS:
        value, there = code.few(mask, count, v, half)
        found.append(code.b.and_(there, code.b.fcmp_ordered(">", value, code.all(lowest, REALS))))
    return code.b.icmp_unsigned("!=", code.b.bitcast(code.b.or_(*found), ir.IntType(LANES)), ir.IntType(LANES)(0))


def _score(code: Code, half: bool, sums: Any, mask: Any, count: Any, scale: Any, lowest: Any) -> Any:
    tops = []
    for v in PARTS:
        added, there = code.few(mask, count, v, half)
        score = code.b.fadd(code.b.fmul(code.numbers(sums, v, False), code.all(scale, REALS)), added)
        seen = code.b.and_(there, code.b.fcmp_ordered(">", added, code.all(lowest, REALS)))
        tops.append(code.b.select(seen, score, reals(HIDDEN)))
        code.put(tops[-1], sums, v, False)
    return code.largest(code.larger(*tops))


def _weigh(code: Code, scores: Any, top: Any) -> None:
    for v in PARTS:
        x = code.b.fmul(code.b.fsub(code.numbers(scores, v, False), code.all(top, REALS)), reals(LOG2E))
        none = code.b.fcmp_ordered("<", x, reals(LEAST))
        weight = code.power(code.b.select(none, reals(LEAST), x))
        code.put(code.b.select(none, reals(0), weight), scores, v, False)


def _square(code: Code, half: bool, row: Any, count: Any) -> Any:
    """A loop over whole vectors, each lane a sum in float64, and the lanes added up in the end."""
    b, before = code.b, code.b.block
    loop, behind = b.append_basic_block("squares"), b.append_basic_block("added")
    none = ir.Constant(LONGS, [0.0] * LANES)
    b.cbranch(b.icmp_signed(">", count, PLACE(0)), loop, behind)
    b.position_at_end(loop)
    i, sums = b.phi(PLACE), b.phi(LONGS)
    x = code.numbers(b.add(row, b.mul(i, PLACE((2 if half else 4) * LANES))), 0, half)
    after, ends = b.add(i, PLACE(1)), b.fadd(sums, b.fpext(b.fmul(x, x), LONGS))
    for phi, first, last in ((i, PLACE(0), after), (sums, none, ends)):
        phi.add_incoming(first, before)
        phi.add_incoming(last, loop)
    b.cbranch(b.icmp_signed("<", after, count), loop, behind)
    b.position_at_end(behind)
    total = b.phi(LONGS)
    total.add_incoming(none, before)
    total.add_incoming(ends, loop)
    for apart in (8, 4, 2, 1):
        turned = ir.Constant(WORDS, [(lane + apart) % LANES for lane in range(LANES)])
        total = b.fadd(total, b.shuffle_vector(total, total, turned))
    return b.extract_element(total, WORD(0))


half_added, real_added = _both(_NOTHING, "aaa", _add)
"""Writes a tile's row of sums, rounded, added to numbers (addresses of the sums, of those numbers, and where to)."""
half_gated, real_gated = _both(_NOTHING, "aaa", _gate)
"""Writes x · sigmoid(x) times another number, of sums of a tile's rows (addresses of the x, of the others, and where to)."""
half_sees, real_sees = _both(_YES, "aar", _see)
"""Whether one of up to 32 numbers of a mask is above one (address, how many there are, that number)."""
half_scored, real_scored = _both(_SINGLE, "aaarr", _score)
"""Makes scores of a tile's row of sums, in place, and says the largest.

Its arguments: addresses of the sums, and of what a mask adds to them; how many keys there are; what sums are multiplied by; and
above what the mask is where a key is seen.
"""
weighed = _of_vectors(_NOTHING, "ar", _weigh)
"""Makes exponentials of a tile's row of scores, in place, of how far they lie below a number (address, that number)."""
half_squared, real_squared = _both(_DOUBLE, "aa", _square)
"""The sum of the squares of a row's numbers, in float64 (address, how many vectors of 16)."""
