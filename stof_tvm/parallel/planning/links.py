"""What moving bytes among GPUs takes: measured on two, scaled to more.

Measured on two H200 of one host (NVLink, 18 links; NCCL 2.28.9 inside CUDA graphs, without NVLink multicast), in
bfloat16.  Between the points times are interpolated linearly in bytes, beyond the last one by its rate.  What was not
measured is derived:

- an all-reduce of n GPUs moves 2 (n - 1) / n of the bytes through each, where two GPUs move all of them once;
- two GPUs of a host store terms in each other's memory while they compute them (relax_passes/runtime/store_to_peer.py):
  what is left is to wait for each other, the stores of the last tiles, and to read one more matrix;
- on a host every GPU sends and receives at the rate of two, whoever the others are;
- between hosts each GPU has `network` bytes per µs each way, and the latency of a small message on a host besides.
"""

from dataclasses import dataclass

import numpy as np

MIB = 1 << 20
SMALL_US = 11.0  # any collective of a few bytes
_MIB = (0, 1, 4, 16, 64, 256)  # of each rank
ARRIVE_US = 6.0  # a kernel by which two GPUs wait for each other
LAST_STORES = 12e6  # bytes that cross the link when nothing is multiplied any more: of two products of 16 and 128 MiB
STORE_RATE = 390e3  # bytes per µs of kernels that store in the other GPU's memory
ALL_REDUCE_US = (SMALL_US, 18.0, 36.0, 79.0, 251.0, 890.0)
EXCHANGE_US = (SMALL_US, 20.0, 34.0, 88.0, 259.0, 883.0)


@dataclass(frozen=True)
class Links:
    """The links among GPUs.

    Attributes
    ----------
    host : int
        GPUs of a host; consecutive ranks are on one.
    network : float
        Bytes per µs (MB/s) that each GPU sends and receives between hosts: an assumption, not a measurement.
    """

    host: int = 8
    network: float = 50e3

    def all_reduce_us(self, nbytes: float, ranks: int) -> float:
        """Microseconds of an all-reduce of `nbytes` of each of consecutive ranks."""
        if ranks == 1 or nbytes == 0:
            return 0.0
        through = nbytes * 2 * (ranks - 1) / ranks
        return self._slower(_interpolated(through, ALL_REDUCE_US), through, ranks <= self.host)

    def sum_us(self, nbytes: float, ranks: int, bandwidth: float) -> float:
        """Microseconds that adding up a product's terms of `nbytes` over consecutive ranks takes beside the product.

        `bandwidth` is that of a GPU's memory, in bytes per µs.
        """
        if ranks != 2 or self.host < 2 or nbytes == 0:
            return self.all_reduce_us(nbytes, ranks)
        return ARRIVE_US + min(nbytes, LAST_STORES) / STORE_RATE + nbytes / bandwidth

    def exchange_us(self, nbytes: float, on_one_host: bool) -> float:
        """Microseconds of an exchange in which the busiest rank sends or receives `nbytes`; 0 without any."""
        return self._slower(_interpolated(nbytes, EXCHANGE_US), nbytes, on_one_host) if nbytes else 0.0

    def _slower(self, us: float, nbytes: float, on_one_host: bool) -> float:
        return us if on_one_host else max(us, SMALL_US + nbytes / self.network)


def _interpolated(nbytes: float, us: tuple[float, ...]) -> float:
    mib = nbytes / MIB
    if mib > _MIB[-1]:
        return us[-1] + (mib - _MIB[-1]) * (us[-1] - us[-2]) / (_MIB[-1] - _MIB[-2])
    return float(np.interp(mib, _MIB, us))
