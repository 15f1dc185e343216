"""Names and operands of PTX instructions that several kernels use."""

from tvm.script import tirx as T

LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
LDMATRIX_TRANS = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
SHORT = {"float16": "f16", "bfloat16": "bf16"}  # PTX's names


def address(x):
    """A shared address as an operand of a PTX instruction."""
    return T.cast(x, "uint32")


ALL_LANES = 0xFFFFFFFF
