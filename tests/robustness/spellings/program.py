"""A program: sizes, inputs and statements as text, from which source code is made, and a model by running that."""

import ast
import copy
import dataclasses
import linecache
import math
import re
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADER = """\
import math

import torch
from torch import nn
from torch.nn import functional as F
{imports}
DTYPE = {dtype}  # of parameters and inputs; torch.float64 in the reference
"""

# What a mask of the user's means, spelled in the model itself for the reference.  Compiled, the functions do nothing.
USER_MASK = """
REFERENCE = False
FILLED = -math.inf
MASK = {mask}


def restricted(scores, transposed=False):
    kept = MASK.dense(scores.shape[-1], scores.shape[-2]).mT if transposed else MASK.dense(*scores.shape[-2:])
    return scores.masked_fill(~kept, -math.inf) if REFERENCE else scores


def unless_emptied(weights, scores, transposed=False):
    \"\"\"Rows that the user's mask emptied, not the model, give 0; with fills as masks, all that both empty.\"\"\"
    if not REFERENCE:
        return weights
    keys = -2 if transposed else -1
    now, before = ((s <= FILLED).all(keys, keepdim=True) for s in (restricted(scores, transposed), scores))
    return weights.masked_fill(now & ~before if FILLED == -math.inf else now, 0.0)


def with_mask(mask, q, k, causal=False):
    \"\"\"The attn_mask of F.scaled_dot_product_attention, restricted.\"\"\"
    if not REFERENCE:
        return mask
    user = MASK.dense(q.shape[-2], k.shape[-2])
    if causal:
        user = user & torch.ones(user.shape[-2:], dtype=torch.bool).tril()
    if mask is None:
        return user
    if mask.dtype == torch.bool:
        return mask & user
    return mask.masked_fill(~user | (mask <= FILLED), -math.inf)
"""

FOOTER = """
if __name__ == "__main__":
    import stof_tvm

    torch.manual_seed({seed})
    model = Model().to(DTYPE).eval()
    example = inputs()
    engine = stof_tvm.build(model, {target!r}, example{mask})
    print(engine(*copies(example)))
    print(model(*copies(example)))
    DTYPE = torch.float64{reference}
    print(model.double()(*(x.double() if x.is_floating_point() else x for x in example)))
"""


@dataclass(frozen=True)
class Program:
    """`sizes` are names of lengths; `inputs` are (name, expression), the rest statements; `results` are names."""

    sizes: tuple[tuple[str, int | str], ...]
    inputs: tuple[tuple[str, str], ...]
    setup: tuple[str, ...]
    body: tuple[str, ...]
    results: tuple[str, ...]
    dtype: str = "torch.float32"
    mask: str | None = None  # an expression of stof_tvm.masks
    seed: int = 0
    features: tuple[str, ...] = ()
    origin: str = ""

    def replace(self, **changes) -> "Program":
        return dataclasses.replace(self, **changes)

    def source(self, target: str | None = None) -> str:
        """Source code; with a target, code that also builds, runs and prints the model when it is run itself."""
        imports = "\nfrom stof_tvm import masks\n" if self.mask else ""
        parts = [f'"""{self.origin}"""\n' if self.origin else "", HEADER.format(imports=imports, dtype=self.dtype)]
        parts += [f"{name} = {size}\n" for name, size in self._sizes_in_use()]
        parts += [USER_MASK.format(mask=self.mask) if self.mask else ""]
        parts += ["\n\nclass Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"]
        parts += [_indented(line) for line in self.setup]
        parts += [f"\n    def forward(self, {', '.join(name for name, _ in self.inputs)}):\n"]
        parts += [_indented(line) for line in self.body]
        parts += [f"        return {', '.join(self.results)}\n"]
        parts += ["\n\ndef inputs():\n", *(f"    {name} = {value}\n" for name, value in self.inputs)]
        parts += [f"    return ({', '.join(name for name, _ in self.inputs)},)\n"]
        parts += ["\n\ndef copies(tensors):\n    return [tensor.clone() for tensor in tensors]\n\n" if target else ""]
        if target:
            mask, reference = (", mask=MASK", "\n    REFERENCE = True") if self.mask else ("", "")
            parts += [FOOTER.format(seed=self.seed, target=target, mask=mask, reference=reference)]
        return "".join(parts)

    def _sizes_in_use(self) -> list[tuple[str, int | str]]:
        text = " ".join([*self.setup, *self.body, *(value for _, value in self.inputs), self.mask or ""])
        used = set(re.findall(r"\b[A-Z]\b", text))
        used |= {"H", "D"} if "C" in used else set()
        return [(name, size) for name, size in self.sizes if name in used]


def _indented(code: str) -> str:
    return "".join(f"        {line}\n" for line in code.splitlines())


class Model:
    """A program that runs: in its own dtype or as the reference, each on inputs of its own."""

    def __init__(self, program: Program):
        source = program.source()
        name = f"<program {hash(source):x}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        self.namespace: dict = {"__name__": "program"}
        exec(compile(ast.parse(source), name, "exec"), self.namespace)
        self.globals = SimpleNamespace()
        self.dtype = self.namespace["DTYPE"]
        self.mask = self.namespace.get("MASK")
        torch.manual_seed(program.seed)
        self.module = self.namespace["Model"]().to(self.dtype).eval()
        self.seed = program.seed

    def inputs(self, variant: int = 0) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(1000 * self.seed + variant + 1)
        return tuple(self.namespace["inputs"]())

    def run(self, inputs) -> list[torch.Tensor]:
        """The model's results as PyTorch computes them in its own dtype."""
        return self._run(copy.deepcopy(self.module), [x.clone() for x in inputs])

    def reference(self, inputs, filled: float = -math.inf) -> list[torch.Tensor]:
        """The model's results in float64, the user's mask applied.

        Operators are those that PyTorch documents: its fast paths differ from them at NaN.  `filled`: a row whose keys
        the user's mask and the model's own fills, of up to this, leave out together gives 0.
        """
        self.namespace.update(DTYPE=torch.float64, REFERENCE=True, FILLED=filled)
        fast, default = torch.backends.mha.get_fastpath_enabled(), torch.get_default_dtype()
        torch.backends.mha.set_fastpath_enabled(False)
        torch.set_default_dtype(torch.float64)
        try:
            with sdpa_kernel(SDPBackend.MATH):
                return self._run(copy.deepcopy(self.module).double(), [_wide(x) for x in inputs])
        finally:
            torch.set_default_dtype(default)
            torch.backends.mha.set_fastpath_enabled(fast)
            self.namespace.update(DTYPE=self.dtype, REFERENCE=False, FILLED=-math.inf)

    def masked_run(self, inputs) -> list[torch.Tensor]:
        """`run` with the user's mask applied."""
        self.namespace.update(REFERENCE=True)
        try:
            return self.run(inputs)
        finally:
            self.namespace.update(REFERENCE=False)

    def _run(self, module, inputs) -> list[torch.Tensor]:
        with torch.no_grad():
            result = module(*inputs)
        return list(result) if isinstance(result, tuple) else [result]


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x.clone()
