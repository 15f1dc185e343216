"""The tile sizes of one instance of the CUDA matrix-product kernels."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GemmConfig:
    """Tile sizes of one instance: a CTA of warps_m × warps_n warps owns a block_m × block_n tile of the product.

    It walks k block_k at a time with `stages` tiles of a and w in shared memory.  For products with few tiles, k is cut
    into `splits` ranges with a CTA each; the CTA that finishes last adds up their sums.  `warpgroup`: products by
    Hopper's wgmma instead of mma.sync; warps_m counts all warps of the warpgroups along m.  `tma`: a further warpgroup
    copies, by the tensor memory accelerator, and each CTA computes one tile after another.  With two `sets` of
    warps_m × warps_n warps, the sets take a CTA's tiles in turn: one multiplies during the other's epilogue.  With
    `tma` and splits of k, the CTAs of a tile are a cluster and take no second tile; each finishes a share of the tile.
    With `tail_n`, tiles of block_n columns only fill whole waves of CTAs; the rest of the rows has tiles of tail_n.
    """

    block_m: int
    block_n: int
    block_k: int
    warps_m: int
    warps_n: int
    stages: int
    splits: int = 1
    warpgroup: bool = False
    tma: bool = False
    sets: int = 1
    tail_n: int = 0

    @property
    def warps(self) -> int:
        """Warps that work on one tile."""
        return self.warps_m * self.warps_n

    @property
    def tile(self) -> tuple[int, int, int, int]:
        """The tile and how warps divide it: (block_m, block_n, warps_m, warps_n)."""
        return self.block_m, self.block_n, self.warps_m, self.warps_n

    @property
    def label(self) -> str:
        """The configuration as reports show it: "128x128x32 2x2 warps 3 stages"."""
        text = f"{self.block_m}x{self.block_n}x{self.block_k} {self.warps_m}x{self.warps_n} warps {self.stages} stages"
        text += " wgmma" * self.warpgroup + " tma" * self.tma
        text += f" {self.sets} sets" * (self.sets > 1)
        text += f" then {self.block_m}x{self.tail_n}" * (self.tail_n > 0)
        return text if self.splits == 1 else f"{text} {self.splits} splits"

    @property
    def symbol(self) -> str:
        """The tile sizes as part of a kernel's name."""
        sizes = (self.block_m, self.block_n, self.block_k, self.warps_m, self.warps_n, self.stages, self.splits)
        kind = "_wgmma" * self.warpgroup + "_tma" * self.tma + f"_{self.sets}_sets" * (self.sets > 1)
        kind += f"_then_{self.tail_n}" * (self.tail_n > 0)
        return "x".join(map(str, sizes)) + kind
