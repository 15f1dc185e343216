"""Layouts of tiles of 16-bit or 32-bit elements in shared memory, free of bank conflicts."""

from dataclasses import dataclass, field

ELEMENT_BYTES = 2  # float16 and bfloat16
WORD_BYTES = 4  # float32
CHUNK = 8  # 16-bit elements in the 16 bytes that one cp.async, ldmatrix row or vector store moves
CHUNK_BYTES = CHUNK * ELEMENT_BYTES
STEP_BYTES = 32  # of a row that one mma multiplies: m16n8k16 of 16-bit elements, m16n8k8 of 32-bit ones
MMA_ROWS = 16  # of mma.m16n8k16; also its depth
MMA_COLS = 8


def element_bytes(dtype: str) -> int:
    """Bytes of an element of q, k, v, of a product's operands and of results."""
    return WORD_BYTES if dtype == "float32" else ELEMENT_BYTES


def chunk_elements(dtype: str) -> int:
    """Elements in the 16 bytes that are copied at a time."""
    return CHUNK_BYTES // element_bytes(dtype)


@dataclass(frozen=True)
class SharedTile:
    """A row-major tile in shared memory, `rows` × `dim`, filled by `threads` threads, free of bank conflicts.

    Elements have 16 bits, or 32 with `element_bytes` = 4.

    The 16-byte chunk c of row r is stored at chunk c ^ swizzle(r).  With P chunks a row and g the largest power of
    two that divides P (at most 8), the XOR of (r / (8/g)) mod g spreads any 8 consecutive rows of one chunk over all
    32 banks and keeps every chunk inside its row, whatever P is (80 elements: P = 10, g = 2).
    """

    rows: int
    dim: int
    threads: int
    element_bytes: int = field(default=ELEMENT_BYTES, kw_only=True)

    @property
    def chunk(self) -> int:
        """Elements of a chunk of 16 bytes."""
        return CHUNK_BYTES // self.element_bytes

    @property
    def chunks(self) -> int:
        """Chunks of 16 bytes in a row."""
        return self.dim // self.chunk

    @property
    def pitch(self) -> int:
        """Bytes from one row to the next."""
        return self.dim * self.element_bytes

    @property
    def size(self) -> int:
        """Bytes of the tile."""
        return self.rows * self.pitch

    @property
    def period(self) -> int:
        """g: the swizzle exchanges chunks within groups of this many."""
        return min(8, self.chunks & -self.chunks)

    def swizzle(self, row):
        """What the chunks of a row are XORed with, 0 … period - 1; also for a symbolic row."""
        return (row // (8 // self.period)) % self.period

    def offset(self, row, chunk):
        """Byte offset of a chunk; also for symbolic row and chunk."""
        return row * self.pitch + (chunk ^ self.swizzle(row)) * CHUNK_BYTES

    def step(self, base, chunk: int):
        """The address `chunk` chunks further along the row of `base`, which lies at chunk 0 or 1 of its row.

        `chunk` is even.  Its low bits are subject to the swizzle, so they are XORed in; its high bits are added.
        """
        low = chunk % self.period
        return (base ^ (low * CHUNK_BYTES)) + (chunk - low) * CHUNK_BYTES

    # -- how threads share the copying of the tile: each keeps its chunk and moves down the rows -------------------

    @property
    def threads_per_row(self) -> int:
        """Threads that copy one row: a power of two, so that a thread's chunk is the same in every pass."""
        return min(1 << (self.chunks - 1).bit_length(), self.threads)

    @property
    def parts(self) -> int:
        """Chunks of a row that a thread copies: more than one if a row has more chunks than there are threads."""
        return -(-self.chunks // self.threads_per_row)

    @property
    def rows_per_pass(self) -> int:
        """Rows that the threads copy at once, at most one chunk each."""
        return self.threads // self.threads_per_row

    @property
    def passes(self) -> int:
        """Rows of which a thread copies chunks, at most."""
        return -(-self.rows // self.rows_per_pass)

    def pass_offset(self, base, i):
        """The address of pass `i` for a thread whose first row lies at `base`."""
        return (base ^ (self.swizzle(i * self.rows_per_pass) * CHUNK_BYTES)) + i * self.rows_per_pass * self.pitch


@dataclass(frozen=True)
class WordTile(SharedTile):
    """A tile of 32-bit elements that is read a word at a time, down its rows: ldmatrix transposes 16-bit elements only.

    A warp reads 8 neighbours of 4 rows, r … r + 3 or r, r + 2, … r + 6.  Their chunks are XORed with 0, 2, 4 and 6 in
    some order, so the words meet 32 different banks if a row's chunks are a multiple of 8, and few else.
    """

    def swizzle(self, row):
        return (row % 4 ^ row // 4 % 2) * 2 % self.period if self.period > 2 else 0

    def word(self, row, column):
        """Byte offset of an element; also for symbolic row and column."""
        return self.offset(row, column // self.chunk) + column % self.chunk * self.element_bytes

    def beside(self, base, rows: int):
        """The address `rows` rows below `base`, 1 or 4, where the swizzle's lowest bit changes."""
        return (base ^ (2 * CHUNK_BYTES)) + rows * self.pitch if self.period > 2 else base + rows * self.pitch


PANEL = 64  # elements in the 128 bytes that Hopper's widest swizzle spans


@dataclass(frozen=True)
class PanelTile(SharedTile):
    """The layout that wgmma reads: panels one after another, each rows × 128 bytes (or 64, or 32) with XOR swizzle.

    Panels are as wide as divides `dim`: 64, 32 or 16 elements.  `dim` is a multiple of 16, and the tile starts at a
    multiple of 1024 bytes.
    """

    @property
    def panel(self) -> int:
        """Elements of a row in a panel."""
        return min(PANEL, self.dim & -self.dim)

    @property
    def panels(self) -> int:
        return self.dim // self.panel

    @property
    def period(self) -> int:
        return self.panel // CHUNK

    @property
    def pitch(self) -> int:
        return self.panel * ELEMENT_BYTES

    @property
    def panel_bytes(self) -> int:
        return self.rows * self.pitch

    @property
    def size(self) -> int:
        """Bytes of all panels."""
        return self.panels * self.panel_bytes

    def offset(self, row, chunk):
        panel = chunk // (self.panel // CHUNK)
        return panel * self.panel_bytes + super().offset(row, chunk % (self.panel // CHUNK))


@dataclass(frozen=True)
class PanelRows(PanelTile):
    """Some rows of a tile in panels that have `panel_rows` rows; offsets are from the first of the `rows`."""

    panel_rows: int

    @property
    def panel_bytes(self) -> int:
        return self.panel_rows * self.pitch
