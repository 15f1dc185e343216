"""Signatures of segments, and the keys by which segments are looked up."""

import pytest

from relax_passes.fusion.operators import OperatorGraph
from relax_passes.fusion.schemes.segment_signature import segment_key, signature
from tests.relax_passes.fusion.modules import encoder_decoder, gated_mlp, post_norm_layer


@pytest.mark.parametrize("make", [post_norm_layer, gated_mlp, encoder_decoder])
def test_keys_of_segments_are_equal_where_their_signatures_are(make):
    graph = OperatorGraph(make()["main"])
    count = len(graph.operators)
    segments = [range(start, end) for end in range(1, count + 1) for start in range(end)]
    found = {}
    for segment in segments:
        found.setdefault(signature(graph, segment), set()).add(segment_key(graph, segment))
    assert all(len(keys) == 1 for keys in found.values())
    assert len(found) == len(set().union(*found.values())) < len(segments)
