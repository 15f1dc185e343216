"""Layouts of tiles of 16-bit elements in shared memory, free of bank conflicts."""

from dataclasses import dataclass

ELEMENT_BYTES = 2  # float16 and bfloat16
CHUNK = 8  # elements in the 16 bytes that one cp.async, ldmatrix row or vector store moves
CHUNK_BYTES = CHUNK * ELEMENT_BYTES
MMA_ROWS = 16  # of mma.m16n8k16; also its depth
MMA_COLS = 8


@dataclass(frozen=True)
class SharedTile:
    """A row-major 16-bit tile in shared memory, `rows` × `dim`, filled by `threads` threads, free of bank conflicts.

    The 16-byte chunk c of row r is stored at chunk c ^ swizzle(r).  With P chunks a row and g the largest power of
    two that divides P (at most 8), the XOR of (r / (8/g)) mod g spreads any 8 consecutive rows of one chunk over all
    32 banks and keeps every chunk inside its row, whatever P is (80 elements: P = 10, g = 2).
    """

    rows: int
    dim: int
    threads: int

    @property
    def chunks(self) -> int:
        """Chunks of 16 bytes in a row."""
        return self.dim // CHUNK

    @property
    def pitch(self) -> int:
        """Bytes from one row to the next."""
        return self.dim * ELEMENT_BYTES

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
        return 1 << (self.chunks - 1).bit_length()

    @property
    def rows_per_pass(self) -> int:
        """Rows that the threads copy at once, at most one chunk each."""
        return self.threads // self.threads_per_row

    @property
    def passes(self) -> int:
        """Chunks that a thread copies, at most."""
        return -(-self.rows // self.rows_per_pass)

    def pass_offset(self, base, i):
        """The address of pass `i` for a thread whose first row lies at `base`."""
        return (base ^ (self.swizzle(i * self.rows_per_pass) * CHUNK_BYTES)) + i * self.rows_per_pass * self.pitch


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
