"""CTAs that share work count their arrivals: the last one reads what all of them wrote and finishes the work."""

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
