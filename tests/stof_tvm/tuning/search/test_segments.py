"""Every segment has tasks whose times are its own, on every kind of target."""

import pytest
import torch

from relax_passes.fusion.operators import ATTENTION
from relax_passes.fusion.schemes.initial_scheme import InitialScheme
from relax_passes.fusion.template_choice import TemplateChooser
from stof_tvm.frontend import import_model
from stof_tvm.site_masks import SiteMasks
from stof_tvm.tuning.search.model_tasks import model_tasks
from stof_tvm.tuning.search.segments import Segments
from tests.models.families import BertLike
from tir_kernels.fusion.registry import templates_for
from tir_kernels.target import parse_target


@pytest.mark.parametrize("target", ["llvm", "cuda -arch=sm_90a"])
def test_every_operator_but_attention_has_a_task(target):
    target = parse_target(target)
    model = BertLike(dim=32, heads=2, layers=1, length=16).eval()
    tasks = model_tasks(import_model(model, (torch.arange(16)[None],), {}).mod, target, SiteMasks(None))
    chooser = TemplateChooser(target, templates_for(target))
    segments = Segments(tasks.graph, chooser)
    for segment in InitialScheme(chooser)(tasks.graph).segments:
        is_attention = tasks.graph.operators[segment.start].kind == ATTENTION
        assert bool(segments[segment].tasks) != is_attention, segment
