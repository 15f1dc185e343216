"""The compiler passes that rewrite models, and their analyses; `pipeline.py` lists the passes in order."""

import tir_kernels  # noqa: F401  before TVM, whose import needs a home or cache folder
from relax_passes.ir.interrupts import register_interrupts

register_interrupts()
