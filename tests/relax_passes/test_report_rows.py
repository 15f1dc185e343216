"""Rows go through a module's attributes and come back the same."""

import tvm

from relax_passes.report_rows import SEGMENTS, SITES, segment_rows, site_rows, with_rows
from tir_kernels.report_rows import SegmentRow, SiteRow


def test_rows_of_a_module():
    sites = [SiteRow(site="", spelling="softmax", reason="its shape", notes=("rows average",))]
    segments = [SegmentRow(0, ("add",)), SegmentRow(1, ("matmul", "relu"), "gemm", "64x64", "tuned", 1.5, 2.0)]
    mod = with_rows(with_rows(tvm.IRModule({}), SITES, sites), SEGMENTS, segments)
    assert site_rows(mod) == sites and segment_rows(mod) == segments
