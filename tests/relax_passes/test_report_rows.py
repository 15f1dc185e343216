"""Rows go through a module's attributes and come back the same."""

import dataclasses

import pytest
import tvm

from relax_passes.report_rows import SEGMENTS, SITES, segment_rows, site_rows, with_rows
from tir_kernels.report_rows import AttentionShape, RewrittenRow, SegmentRow, SiteRow, site_row


def test_rows_of_a_module():
    sites = [SiteRow(site="", spelling="softmax", reason="its shape", notes=("rows average",))]
    segments = [SegmentRow(0, ("add",)), SegmentRow(1, ("matmul", "relu"), "gemm", "64x64", "tuned", 1.5, 2.0)]
    mod = with_rows(with_rows(tvm.IRModule({}), SITES, sites), SEGMENTS, segments)
    assert site_rows(mod) == sites and segment_rows(mod) == segments


STATIC = RewrittenRow(
    site="layer",
    spelling="sdpa",
    reason="predicted",
    kernel="block-wise",
    config="64x64",
    block=(64, 64),
    mask="causal()",
    mask_digest="0",
    shape=AttentionShape(1, 2, 2, 96, 96, 16, "float32"),
    layouts=("bhsd",) * 4,
    predicted_us=1.0,
    measured_us=None,
)
RULED = dataclasses.replace(STATIC, rule="top_blocks(2)", block_map=(1, 2, 3, 3))


def test_rows_of_attentions_with_rules():
    for row in (STATIC, RULED):
        assert site_row(row.to_dict()) == row
    assert "rule" not in STATIC.to_dict() and not STATIC.returns_map
    assert RULED.returns_map and not dataclasses.replace(RULED, block_map=(1, 2, 4096, 4096)).returns_map


@pytest.mark.parametrize(
    "wrong", [{"block_map": [1, 2, 3]}, {"block_map": [1, 0, 3, 3]}, {"rule": 3}, {"block_map": "x"}]
)
def test_rows_of_rules_are_checked(wrong):
    with pytest.raises(ValueError, match="block_map|rule"):
        site_row({**RULED.to_dict(), **wrong})
