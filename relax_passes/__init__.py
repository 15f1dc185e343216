"""The passes that rewrite models, and what they know of them; `pipeline.py` is the table of contents."""

import tir_kernels  # noqa: F401  before TVM, which asks for a home
from relax_passes.ir.interrupts import register_interrupts

register_interrupts()
