"""What is left of transformers' models for the kernels around attention."""

from collections import Counter

import pytest

from stof_tvm.frontend import import_model
from stof_tvm.site_masks import SiteMasks
from stof_tvm.tuning.search.model_tasks import model_tasks
from tests.models.transformers_models import transformers_inputs, transformers_model
from tir_kernels.target import parse_target

pytest.importorskip("transformers")


def test_half_precision_t5_reduces_nothing_but_rows():
    """Its clamps against overflow, two in the encoder's layer and three in the decoder's, are elementwise."""
    model, inputs = transformers_model("t5", "sdpa").half(), transformers_inputs("t5", padded=False)
    mod = import_model(model, (), inputs).mod
    operators = model_tasks(mod, parse_target("cuda -arch=sm_90a"), SiteMasks(None)).graph.operators
    names = Counter(operator.name for operator in operators)
    assert names["clip"] == 5 and names["nn.rms_norm"] == 7
    assert not {"isinf", "max", "minimum", "maximum"} & names.keys()
