"""A kernel that tells each token of a row which document it is in: a thread a token.

What follows the last document is no document's: each token there is one by itself.
"""

import tvm
from tvm.script import tirx as T

from tir_kernels.cuda.finished import finished

THREADS = 256


def tokens() -> tvm.tirx.PrimFunc:
    """The kernel; arguments documents, bounds, first, place, number, taken, starts, ends.

    documents : int32 (documents + 1, 2)
        (place on the row, place where it is taken from) of each document's first token; then (the end of the last
        document, 0).
    bounds : int32 (tokens, 2)
        The first token of a token's document, and the one after its last.
    first, place, number : int64 (tokens,)
        The first token of its document, its place in it, and the document's number.  After the last document these are
        the token itself, 0, and the number of documents.
    taken : int64 (tokens,)
        Where each token is taken from; after the last document, that document's last token again.
    starts, ends : int64 (any,)
        First and last token of each document and of what follows them, if anything does; then the last one's again.
    """

    @T.jit(private=True)
    def kernel(
        documents_handle: T.handle,
        bounds_handle: T.handle,
        first_handle: T.handle,
        place_handle: T.handle,
        number_handle: T.handle,
        taken_handle: T.handle,
        starts_handle: T.handle,
        ends_handle: T.handle,
    ):
        n_documents = T.int32()
        n_tokens = T.int32()
        n_starts = T.int32()
        documents = T.match_buffer(documents_handle, (n_documents, 2), "int32", align=8)
        bounds = T.match_buffer(bounds_handle, (n_tokens, 2), "int32", align=8)
        first = T.match_buffer(first_handle, (n_tokens,), "int64")
        place = T.match_buffer(place_handle, (n_tokens,), "int64")
        number = T.match_buffer(number_handle, (n_tokens,), "int64")
        taken = T.match_buffer(taken_handle, (n_tokens,), "int64")
        starts = T.match_buffer(starts_handle, (n_starts,), "int64")
        ends = T.match_buffer(ends_handle, (n_starts,), "int64")

        T.device_entry()
        cta = T.cta_id([T.ceildiv(n_tokens + n_starts, THREADS)])
        thread = T.thread_id([THREADS])
        token = T.meta_var(cta * THREADS + thread)
        end = T.alloc_local([1], "int32")  # of the last document
        end[0] = documents[n_documents - 1, 0]
        if token < n_tokens:
            low = T.alloc_local([1], "int32")
            high = T.alloc_local([1], "int32")
            middle = T.alloc_local([1], "int32")
            own = T.alloc_local([1], "int32")
            own[0] = T.min(token, end[0] - 1)
            # The last document that begins at this token or before it.
            low[0] = 0
            high[0] = n_documents - 1
            while high[0] - low[0] > 1:
                middle[0] = T.truncdiv(low[0] + high[0], 2)
                if documents[middle[0], 0] <= own[0]:
                    low[0] = middle[0]
                else:
                    high[0] = middle[0]
            begin = T.meta_var(documents[low[0], 0])
            taken[token] = T.cast(documents[low[0], 1] + own[0] - begin, "int64")
            if token < end[0]:
                bounds[token, 0] = begin
                bounds[token, 1] = documents[low[0] + 1, 0]
                first[token] = T.cast(begin, "int64")
                place[token] = T.cast(token - begin, "int64")
                number[token] = T.cast(low[0], "int64")
            else:
                bounds[token, 0] = token
                bounds[token, 1] = token + 1
                first[token] = T.cast(token, "int64")
                place[token] = T.int64(0)
                number[token] = T.cast(n_documents - 1, "int64")
        else:
            if token < n_tokens + n_starts:
                entry = T.meta_var(token - n_tokens)
                last = T.meta_var(T.Select(end[0] < n_tokens, n_documents - 1, n_documents - 2))
                at = T.alloc_local([1], "int32")
                at[0] = T.min(entry, last)
                starts[entry] = T.cast(documents[at[0], 0], "int64")
                if at[0] < n_documents - 1:
                    ends[entry] = T.cast(documents[at[0] + 1, 0] - 1, "int64")
                else:
                    ends[entry] = T.cast(n_tokens - 1, "int64")

    return finished(kernel, "document_tokens", [])
