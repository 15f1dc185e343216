"""Names and operands of PTX instructions that several kernels use, and the elements in words that they load."""

from tvm.script import tirx as T

LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
LDMATRIX_TRANS = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
SHORT = {"float16": "f16", "bfloat16": "bf16"}  # PTX's names


def address(x):
    """A shared address as an operand of a PTX instruction."""
    return T.cast(x, "uint32")


ALL_LANES = 0xFFFFFFFF


def element(words, at: int, i, dtype: str):
    """Element i of the vector that begins at words[at], as float32."""
    if dtype == "float32":
        return T.reinterpret("float32", words[at + i])
    word = words[at + i // 2]
    if dtype == "bfloat16":
        return T.reinterpret("float32", (word >> T.cast(i % 2 * 16, "uint32")) << T.uint32(16))
    bits = T.cast(word >> T.cast(i % 2 * 16, "uint32"), "uint16")
    return T.cast(T.reinterpret("float16", bits), "float32")
