"""The table of elementwise operators: every functional overload of each computes in PyTorch's dtype (promotion.py)."""

from stof_tvm.frontend.operators.elementwise.binary import BINARY
from stof_tvm.frontend.operators.elementwise.promotion import overloads
from stof_tvm.frontend.operators.elementwise.unary import UNARY

POINTWISE_CONVERTERS = {}
for name, operator in (UNARY | BINARY).items():
    POINTWISE_CONVERTERS |= {name: operator} if "." in name else overloads(name, operator)
