"""Shards of tensors: what a rank has, and what reshapes make of it."""

import pytest

from relax_passes.parallel.placement import NotShardable, Ranks, Shard, reshaped


def test_a_rank_has_its_part_of_every_piece():
    shard = Shard(1, (8, 4, 4))
    assert shard.ranges(Ranks(1, 2, "sum")) == [(4, 8), (10, 12), (14, 16)]
    assert shard.local_shape((3, 16), 2) == (3, 8)


@pytest.mark.parametrize(
    ("shard", "old", "new", "expected"),
    [
        (Shard(2, (32,)), (2, 5, 32), (2, 5, 4, 8), Shard(2, (4,))),
        (Shard(2, (4,)), (2, 5, 4, 8), (10, 32), Shard(1, (32,))),
        (Shard(3, (4,)), (2, 5, 3, 4, 8), (2, 5, 96), Shard(2, (32, 32, 32))),  # packed q, k and v
        (Shard(2, (32, 32, 32)), (2, 5, 96), (2, 5, 3, 4, 8), Shard(3, (4,))),
        (Shard(1, (2,)), (1, 2, 16, 8), (2, 16, 8), Shard(0, (2,))),
    ],
)
def test_a_reshape_moves_what_is_divided(shard, old, new, expected):
    assert reshaped(shard, old, new, 2) == expected


def test_a_reshape_that_would_cut_heads_is_refused():
    with pytest.raises(NotShardable, match="mixes what the ranks divide"):
        reshaped(Shard(1, (24,)), (2, 24), (2, 3, 8), 2)


def test_pieces_that_ranks_do_not_divide_are_refused():
    with pytest.raises(NotShardable, match="2 ranks do not divide 3"):
        Shard(0, (3,)).check((3,), 2)
