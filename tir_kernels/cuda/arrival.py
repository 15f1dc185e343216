"""CTAs that share work wait for one another.

Those of a grid count their arrivals: the last one reads what all of them wrote and finishes the work.  Those of a
cluster, which run together and reach each other's shared memory (sm_90a), have barriers.
"""

from tvm.script import tirx as T

from tir_kernels.cuda.ptx import address


@T.inline
def arrive(word, counter, most, encode, thread, flag, sync=T.cuda.cta_sync):
    """Count this CTA's arrival; word[0] = encode(n), where n CTAs arrived before it: `most` for the last CTA.

    The last CTA can read, past its L1 cache, what the CTAs wrote before they arrived.  The counter, uint32 in global
    memory, wraps to 0 at the last arrival, so the next launch finds it as this one did.  `flag` is the address of 4
    bytes of shared memory, through which thread 0 passes the value to the others that call this;
    `sync` is their barrier.
    """
    sync()
    if thread == 0:
        T.ptx["atom.acq_rel.gpu.global.inc.u32"](word[0], counter, most)
        T.ptx["st.shared.b32"](address(flag), encode(word[0]))
    sync()
    T.ptx["ld.shared.b32"](word[0], address(flag))


@T.inline
def cluster_sync():
    """A barrier of the cluster: after it, every CTA can read what any of them wrote before.

    It counts every thread of every CTA of the cluster, including those that copy and those that idle, one by one: warps
    need not be converged.
    """
    T.ptx["barrier.cluster.arrive.release"]()
    T.ptx["barrier.cluster.wait.acquire"]()


@T.inline
def leave_together():
    """A barrier before the end: no CTA ends while another CTA of its cluster reads its shared memory.

    It waits for no stores, since nothing has to become visible.  A thread's reads are over when it arrives, because the
    results that it stored depend on them.
    """
    T.ptx["barrier.cluster.arrive.relaxed"]()
    T.ptx["barrier.cluster.wait.acquire"]()
