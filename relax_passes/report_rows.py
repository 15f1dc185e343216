"""Rows of the report, from pass to pass: JSON in the module attributes `stof.sites` and `stof.segments`."""

import json
from collections.abc import Sequence

import tvm

from tir_kernels.report_rows import SegmentRow, SiteRow, segment_row, site_row

SITES, SEGMENTS = "stof.sites", "stof.segments"


def site_rows(mod: tvm.IRModule) -> list[SiteRow]:
    """The attentions of a module, behind `RewriteMaskedAttention`."""
    return [site_row(data) for data in json.loads(str(mod.attrs[SITES]))]


def segment_rows(mod: tvm.IRModule) -> list[SegmentRow]:
    """The segments of a module, behind `PartitionSegments`."""
    return [segment_row(data) for data in json.loads(str(mod.attrs[SEGMENTS]))]


def with_rows(mod: tvm.IRModule, attribute: str, rows: Sequence[SiteRow | SegmentRow]) -> tvm.IRModule:
    """The module with rows in an attribute, `SITES` or `SEGMENTS`."""
    return mod.with_attr(attribute, json.dumps([row.to_dict() for row in rows]))
