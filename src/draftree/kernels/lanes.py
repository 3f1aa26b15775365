"""What compiled layers do between their products, sixteen numbers at a time: norms, gates, scores and their exponentials.

numba's own loops become such code only where LLVM can tell that what is written is not what is read, which within a whole layer
it cannot. Every number is the same chain of operations wherever it lies.

Shapes: a tile's row has 32 numbers; W entries of a row.
"""

from collections.abc import Callable
from inspect import Parameter, Signature
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
NO_SUMS = ir.Constant(LONGS, [0.0] * LANES)
HIDDEN, LEAST, MOST = -3e38, -126.0, 126.0
"""A score that no key has; exponents of 2 below which a weight is 0, and beyond which this one is taken."""
LOG2E = 1.4426950408889634
POWER = (0.00015403530, 0.0013333558, 0.0096181291, 0.055504109, 0.24022651, 0.69314718, 1.0)
"""2^y on [−½, ½] as a polynomial, the highest power first, to some 10⁻⁷."""


def reals(value: float) -> Any:
    """A vector of one number that is known."""
    return ir.Constant(REALS, [float(np.float32(value))] * LANES)


def words(value: int | list[int]) -> Any:
    """A vector of one word that is known, or of several."""
    return ir.Constant(WORDS, value if isinstance(value, list) else [value] * LANES)


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

    def lanes(self, count: Any, first: int = 0) -> Any:
        """Which numbers of a vector, from that one on, are among the first so many."""
        return self.b.icmp_signed("<", words(list(range(first, first + LANES))), self.all(self.b.trunc(count, WORD), WORDS))

    def some(self, place: Any, first: Any, there: Any, half: bool) -> Any:
        """A row's numbers from one on, the lanes that are there; all where it is None."""
        kind, size = (HALVES, 2) if half else (REALS, 4)
        place = self.b.add(place, self.b.mul(first, PLACE(size)))
        if there is None:
            found = self.at(place, kind)
        else:
            name = f"llvm.masked.load.v{LANES}{'i16' if half else 'f32'}.p0"
            load = self.function(name, ir.FunctionType(kind, [kind.as_pointer(), WORD, BITS, kind]))
            address = self.b.inttoptr(place, kind.as_pointer())
            found = self.b.call(load, [address, WORD(size), there, ir.Constant(kind, [0] * LANES)])
        return self.widened(found) if half else found

    def keep(self, value: Any, place: Any, first: Any, there: Any, half: bool) -> None:
        """Writes them, rounded."""
        kind, size = (HALVES, 2) if half else (REALS, 4)
        place = self.b.add(place, self.b.mul(first, PLACE(size)))
        if there is None:
            self.put(value, place, 0, half)
            return
        name = f"llvm.masked.store.v{LANES}{'i16' if half else 'f32'}.p0"
        store = self.function(name, ir.FunctionType(ir.VoidType(), [kind, kind.as_pointer(), WORD, BITS]))
        value = self.halved(value) if half else value
        self.b.call(store, [value, self.b.inttoptr(place, kind.as_pointer()), WORD(size), there])

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

    def halved(self, value: Any) -> Any:
        """Numbers as bfloat16."""
        return self.b.trunc(self.b.lshr(self.b.bitcast(self.rounded(value, True), WORDS), words(16)), HALVES)

    def put(self, value: Any, place: Any, v: int, half: bool) -> None:
        """Writes a row's vector."""
        self.write(self.halved(value) if half else value, place, (2 if half else 4) * LANES * v)

    def larger(self, one: Any, other: Any) -> Any:
        """The larger ones; the first where one of them is no number."""
        return self.b.select(self.b.fcmp_ordered("<", one, other), other, one)

    def largest(self, value: Any) -> Any:
        """The largest number of a vector."""
        return self.folded(value, self.larger)

    def added(self, value: Any) -> Any:
        """The sum of a vector's numbers."""
        return self.folded(value, self.b.fadd)

    def folded(self, value: Any, by: Callable[[Any, Any], Any]) -> Any:
        """What comes of all numbers of a vector, put together two by two."""
        for apart in (8, 4, 2, 1):
            turned = words([(i + apart) % LANES for i in range(LANES)])
            value = by(value, self.b.shuffle_vector(value, value, turned))
        return self.b.extract_element(value, WORD(0))

    def each(self, count: Any, body: Callable[[Any, Any, Any], Any], total: Any = NO_SUMS) -> Any:
        """Writes code for all vectors of a row of so many numbers: a loop over whole ones, and once for what is left.

        Args:
            count: the numbers.
            body: given the first number of a vector, which lanes are there (None: all) and what came of the vectors before;
                returns what comes of it.
            total: what came before the first.
        """
        b, before = self.b, self.b.block
        loop, rest, last, behind = (b.append_basic_block(name) for name in ("vectors", "rest", "last", "behind"))
        whole = b.and_(count, PLACE(-LANES))
        b.cbranch(b.icmp_signed(">", whole, PLACE(0)), loop, rest)
        b.position_at_end(loop)
        first, found = b.phi(PLACE), b.phi(total.type)
        one, following = body(first, None, found), b.add(first, PLACE(LANES))
        b.cbranch(b.icmp_signed("<", following, whole), loop, rest)
        b.position_at_end(rest)
        of_whole = b.phi(total.type)
        b.cbranch(b.icmp_signed("<", whole, count), last, behind)
        b.position_at_end(last)
        other = body(whole, self.lanes(b.sub(count, whole)), of_whole)
        b.branch(behind)
        b.position_at_end(behind)
        of_all = b.phi(total.type)
        for phi, value, where in (
            (first, PLACE(0), before), (first, following, loop), (found, total, before), (found, one, loop),
            (of_whole, total, before), (of_whole, one, loop), (of_all, of_whole, rest), (of_all, other, last),
        ):  # fmt: skip
            phi.add_incoming(value, where)
        return of_all

    def power(self, x: Any) -> Any:
        """2^x for exponents of a normal number."""
        floor = self.function("llvm.floor.v16f32", ir.FunctionType(REALS, [REALS]))
        whole = self.b.call(floor, [self.b.fadd(x, reals(0.5))])
        y, p = self.b.fsub(x, whole), reals(POWER[0])
        for factor in POWER[1:]:
            p = self.fused(p, y, reals(factor))
        exponent = self.b.add(self.b.fptosi(whole, WORDS), words(127))
        return self.b.fmul(p, self.b.bitcast(self.b.shl(exponent, words(23)), REALS))

    def gated(self, x: Any, other: Any, half: bool) -> Any:
        """x · sigmoid(x), rounded, times another number."""
        z = self.larger(self.b.fmul(x, reals(-LOG2E)), reals(-MOST))
        z = self.b.select(self.b.fcmp_ordered(">", z, reals(MOST)), reals(MOST), z)
        return self.b.fmul(self.rounded(self.b.fdiv(x, self.b.fadd(reals(1), self.power(z))), half), other)


_KINDS: Any = types  # untyped, as much of numba is
OF_LETTERS = {"a": _KINDS.int64, "r": _KINDS.float32, "h": _KINDS.boolean}


def of_vectors(result: Any, given: str, body: Callable[..., Any]) -> Any:
    """A function of addresses and numbers whose body is written for vectors.

    Args:
        result: what it returns, a type of numba's.
        given: a letter for each argument: `a` address or count, `r` float32, and `h`, at the end, whether a row's numbers are
            bfloat16's, else float32's.
        body: given a `Code`, with `h` whether they are, and the arguments before; with `h` it is written for both.
    """

    def made(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if given[-1] != "h":
            found = body(Code(builder), *args)
            return context.get_dummy_value() if found is None else found
        ends = []
        with builder.if_else(args[-1]) as ways:
            for way, half in zip(ways, (True, False), strict=True):
                with way:
                    ends.append((body(Code(builder), half, *args[:-1]), builder.block))
        if ends[0][0] is None:
            return context.get_dummy_value()
        either = builder.phi(ends[0][0].type)
        for value, where in ends:
            either.add_incoming(value, where)
        return either

    def typed(typing: Any, *args: Any) -> Any:
        return result(*map(OF_LETTERS.__getitem__, given)), made

    names = ["typing", *(f"{letter}{i}" for i, letter in enumerate(given))]  # numba looks at them
    vars(typed)["__signature__"] = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names])
    return intrinsic(typed)


_NOTHING, _SINGLE, _YES = (getattr(types, name) for name in ("void", "float32", "boolean"))


def _add(code: Code, half: bool, sums: Any, before: Any, out: Any) -> None:
    for v in PARTS:
        made = code.rounded(code.numbers(sums, v, False), half)
        code.put(code.b.fadd(code.numbers(before, v, half), made), out, v, half)


def _gate(code: Code, half: bool, gates: Any, ups: Any, out: Any) -> None:
    for v in PARTS:
        x, up = (code.rounded(code.numbers(place, v, False), half) for place in (gates, ups))
        code.put(code.gated(x, up, half), out, v, half)


def _see(code: Code, half: bool, mask: Any, count: Any, lowest: Any) -> Any:
    found = []
    for v in PARTS:
        there = code.lanes(count, LANES * v)
        above = code.b.fcmp_ordered(">", code.some(mask, PLACE(LANES * v), there, half), code.all(lowest, REALS))
        found.append(code.b.and_(there, above))
    return code.b.icmp_unsigned("!=", code.b.bitcast(code.b.or_(*found), ir.IntType(LANES)), ir.IntType(LANES)(0))


def _score(code: Code, half: bool, sums: Any, mask: Any, count: Any, scale: Any, lowest: Any) -> Any:
    tops = []
    for v in PARTS:
        there = code.lanes(count, LANES * v)
        added = code.some(mask, PLACE(LANES * v), there, half)
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


added = of_vectors(_NOTHING, "aaah", _add)
"""Writes a tile's row of sums, rounded, added to numbers (addresses of the sums, of those numbers, and where to)."""
gated = of_vectors(_NOTHING, "aaah", _gate)
"""Writes x · sigmoid(x) times another number, of sums of a tile's rows (addresses of the x, of the others, and where to)."""
sees = of_vectors(_YES, "aarh", _see)
"""Whether one of up to 32 numbers of a mask is above one (address, how many there are, that number)."""
scored = of_vectors(_SINGLE, "aaarrh", _score)
"""Makes scores of a tile's row of sums, in place, and says the largest.

Its arguments: addresses of the sums, and of what a mask adds to them; how many keys there are; what sums are multiplied by; and
above what the mask is where a key is seen.
"""
weighed = of_vectors(_NOTHING, "ar", _weigh)
"""Makes exponentials of a tile's row of scores, in place, of how far they lie below a number (address, that number)."""
