"""Rows of the report, which passes hand on as JSON in the module attributes `stof.sites` and `stof.segments`."""

import json
from collections.abc import Sequence

import tvm

from tir_kernels.report_rows import SegmentRow, SiteRow, segment_row, site_row

SITES, SEGMENTS = "stof.sites", "stof.segments"


def site_rows(mod: tvm.IRModule) -> list[SiteRow]:
    """The rows of a module's attentions; after `RewriteMaskedAttention`."""
    return [site_row(data) for data in json.loads(str(mod.attrs[SITES]))]


def segment_rows(mod: tvm.IRModule) -> list[SegmentRow]:
    """The rows of a module's segments; after `PartitionSegments`."""
    return [segment_row(data) for data in json.loads(str(mod.attrs[SEGMENTS]))]


def with_rows(mod: tvm.IRModule, attribute: str, rows: Sequence[SiteRow | SegmentRow]) -> tvm.IRModule:
    """The module with rows in an attribute, `SITES` or `SEGMENTS`."""
    return mod.with_attr(attribute, json.dumps([row.to_dict() for row in rows]))
