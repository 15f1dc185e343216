"""Legalizations for every target that replace TVM's where they give other numbers than PyTorch, or endless indices."""

from relax_passes.legalizations.casts import CASTS
from relax_passes.legalizations.extrema import EXTREMA
from relax_passes.legalizations.gelu import GELU
from relax_passes.legalizations.grouped_products import GROUPED_PRODUCTS
from relax_passes.legalizations.norms import NORMS
from relax_passes.legalizations.sorting import SORTS
from relax_passes.legalizations.views import RESHAPES
from relax_passes.legalizations.zeros import ZEROS

LEGALIZATIONS = {**CASTS, **EXTREMA, **GELU, **GROUPED_PRODUCTS, **NORMS, **RESHAPES, **SORTS, **ZEROS}
