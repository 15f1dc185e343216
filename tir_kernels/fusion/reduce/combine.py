"""Device code that joins what threads, warps and CTAs found of a reduction, always in the same order.

Accumulators are float32 for floats, else integers of the reduction's own dtype.  They cross shared and global memory as
32-bit words.
"""

from collections.abc import Callable

from tvm import tirx
from tvm.script import tirx as T

from tir_kernels.cuda.arrival import arrive
from tir_kernels.cuda.device import WARP
from tir_kernels.cuda.prologue import scalar
from tir_kernels.cuda.ptx import ALL_LANES, address
from tir_kernels.fusion.group.emit import assign
from tir_kernels.fusion.group.operators import ELEMENTWISE
from tir_kernels.fusion.group.store import where
from tir_kernels.fusion.reduce.geometry import FLAG_BYTES, ReduceGeometry
from tir_kernels.fusion.rows.statistics import local_buffers

AT_ONCE = 4  # splits whose words a thread loads together


def joined(kind: str) -> Callable:
    """`join(a, b)` of a kind of reduction; a NaN among them stays."""
    if kind in ("max", "min"):
        return ELEMENTWISE[f"{kind}imum"].expression
    return (lambda a, b: a * b) if kind == "prod" else (lambda a, b: a + b)


def neutral(kind: str, dtype: str):
    """What changes nothing when it is joined."""
    if kind in ("max", "min"):
        if dtype == "float32":
            bits = 0xFF800000 if kind == "max" else 0x7F800000
            return T.reinterpret("float32", T.uint32(bits))
        return tirx.min_value(dtype) if kind == "max" else tirx.max_value(dtype)
    return tirx.const(1 if kind == "prod" else 0, dtype)


@T.inline
def repeated(count, body):
    for i in T.serial(count):
        body(i)


class Combiner:
    """Joins the accumulators of a CTA's threads.

    `thread` is the number in the CTA, `item` and `part` are the thread's item and its place among those that share it;
    `base` is where shared memory begins.
    """

    def __init__(self, g: ReduceGeometry, dtype: str, thread, item, part, base):
        self.g, self.dtype, self.base = g, dtype, base
        self.thread, self.item, self.part = thread, item, part
        self.join, self.neutral = joined(g.reduction.kind), neutral(g.reduction.kind, dtype)

    def fill(self, acc, count: int | None = None) -> None:
        """Set `count` accumulators, by default those of an item, to what changes nothing."""
        for lane in range(count or self.g.lanes):
            assign(acc, lane, self.neutral)

    def add(self, acc, lane: int, value, condition=None) -> None:
        """Join a value to an accumulator, if the condition holds."""
        value = value if condition is None else T.Select(condition, value, self.neutral)
        assign(acc, lane, self.join(acc[lane], value))

    def in_cta(self, acc) -> None:
        """Join the accumulators of the threads of an item: thread 0 of each then holds the whole."""
        for distance in self.g.distances:
            for lane in range(self.g.lanes):
                # In a register, because what joins may read it twice, or not at all in some threads.
                other = scalar("other", T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), acc[lane], distance, WARP, WARP))
                assign(acc, lane, self.join(acc[lane], other))
        if self.g.warp_parts == 1:
            return
        within = self.g.config.sharing // self.g.warp_parts  # threads of a part, which hold the same by now
        where([self.part % within == 0] if within > 1 else [], lambda: self._write_shared(acc, self.part // within))
        _synchronize()
        where([self.part == 0], lambda: self._read_shared(acc))

    def between_ctas(self, acc, partials, arrivals, word, tile, split, owner: list) -> None:
        """Leave the item in global memory; in the last CTA to arrive, join those of all splits.

        word[0] is 1 in that CTA, else 0.
        """
        splits, most = self.g.config.splits, self.g.config.splits - 1
        at = tile * self.g.config.items + self.item

        def write():
            for lane in range(self.g.lanes):
                for w, bits in enumerate(self._words_of(acc[lane])):
                    _store(partials.ptr_to([split, w, lane, at]), bits)

        def read(number, buffer) -> list:
            for lane in range(self.g.lanes):
                for w in range(self.g.words):
                    _load(buffer, lane * self.g.words + w, partials.ptr_to([number, w, lane, at]))
            return [self._of_words(buffer, lane) for lane in range(self.g.lanes)]

        def some(i):
            for u in range(at_once):
                number = (i * at_once + u) * self.g.config.sharing + self.part
                (buffer,) = local_buffers("words", 1, self.g.lanes * self.g.words, "uint32")
                for lane, value in enumerate(read(T.min(number, most), buffer)):
                    self.add(acc, lane, value, number < splits if ends else None)

        where(owner, write)
        is_last = lambda arrived: T.cast(arrived == T.uint32(most), "uint32")
        arrive(word, arrivals.ptr_to([tile]), T.uint32(most), is_last, self.thread, self.base)
        rounds = -(-splits // self.g.config.sharing)
        at_once = min(AT_ONCE, rounds)
        ends = splits % (self.g.config.sharing * at_once) != 0

        def rest():
            self.fill(acc)
            repeated(-(-rounds // at_once), some)
            self.in_cta(acc)

        where([word[0] != T.uint32(0)], rest)

    # -- words -----------------------------------------------------------------------------------------------------

    def _words_of(self, value) -> list:
        if self.g.words == 1:
            return [T.reinterpret("uint32", value)]
        return [T.cast(value, "uint32"), T.cast(value >> T.int64(32), "uint32")]

    def _of_words(self, buffer, lane: int):
        at = lane * self.g.words
        if self.g.words == 1:
            return T.reinterpret(self.dtype, buffer[at])
        return T.cast(buffer[at], "int64") + (T.cast(T.reinterpret("int32", buffer[at + 1]), "int64") << T.int64(32))

    # -- shared memory ---------------------------------------------------------------------------------------------

    def _slot(self, part, lane: int, word: int):
        g = self.g
        index = ((part * g.words + word) * g.lanes + lane) * g.config.items + self.item
        return address(self.base + FLAG_BYTES + index * 4)

    def _write_shared(self, acc, part) -> None:
        for lane in range(self.g.lanes):
            for w, bits in enumerate(self._words_of(acc[lane])):
                _store_shared(self._slot(part, lane, w), bits)

    def _read_shared(self, acc) -> None:
        """Join the parts in their order."""
        self.fill(acc)

        def one(part):
            (buffer,) = local_buffers("words", 1, self.g.lanes * self.g.words, "uint32")
            for lane in range(self.g.lanes):
                for w in range(self.g.words):
                    _load_shared(buffer, lane * self.g.words + w, self._slot(part, lane, w))
                self.add(acc, lane, self._of_words(buffer, lane))

        repeated(self.g.warp_parts, one)


@T.inline
def _synchronize():
    T.cuda.cta_sync()


@T.inline
def _store(pointer, bits):
    T.ptx["st.global.b32"](pointer, bits)


@T.inline
def _load(buffer, at, pointer):
    T.ptx["ld.global.cg.b32"](buffer[at], pointer)


@T.inline
def _store_shared(slot, bits):
    T.ptx["st.shared.b32"](slot, bits)


@T.inline
def _load_shared(buffer, at, slot):
    T.ptx["ld.shared.b32"](buffer[at], slot)
