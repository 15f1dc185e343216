"""The table of elementwise operators: every functional overload of each computes in PyTorch's dtype (promotion.py)."""

from stof_tvm.frontend.binary import BINARY
from stof_tvm.frontend.promotion import overloads
from stof_tvm.frontend.unary import UNARY

POINTWISE_CONVERTERS = {}
for name, operator in (UNARY | BINARY).items():
    POINTWISE_CONVERTERS |= {name: operator} if "." in name else overloads(name, operator)
