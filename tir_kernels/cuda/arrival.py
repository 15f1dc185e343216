"""CTAs that share work arrive at a counter: the last one finds what all of them wrote, and finishes it."""

from tvm.script import tirx as T

from tir_kernels.cuda.ptx import address


@T.inline
def arrive(word, counter, most, told, thread, flag):
    """word[0] = `told` of how many CTAs arrived at the counter before this one, which is `most` for the last of them.

    What the CTAs wrote before, the last one can read past its L1 cache.  The counter, uint32 in global memory, wraps to
    0 at the last arrival: the next launch finds what this one found.  `flag` is the shared address of 4 bytes by which
    a CTA's first thread tells the others.
    """
    T.cuda.cta_sync()
    if thread == 0:
        T.ptx["atom.acq_rel.gpu.global.inc.u32"](word[0], counter, most)
        T.ptx["st.shared.b32"](address(flag), told(word[0]))
    T.cuda.cta_sync()
    T.ptx["ld.shared.b32"](word[0], address(flag))
