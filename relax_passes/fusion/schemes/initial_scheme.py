"""The scheme that a search starts from: the cut of the operators with the least predicted time.

The paper starts from a rule that it calls neural hashing and does not describe.  An analytical model takes its place
here.  Where a template computes a segment, the template predicts its cost.  Any other segment costs what TVM's own
kernels would: for each kernel a launch, and the longer of its bytes over the bandwidth and its operations over the
arithmetic rate.  So fusion saves launches and the bytes of intermediate results.  Templates with `IS_PROPOSED = False`
are left to the search, which measures them.  Segments are contiguous in the canonical order and their costs add up, so
dynamic programming finds the least sum.
"""

import math
from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.fusion.operators import ATTENTION, CI, MI, OperatorGraph
from relax_passes.fusion.partition_segments import SegmentContents
from relax_passes.fusion.schemes.fusion_scheme import MAX_CI, FusionScheme, check_segment
from relax_passes.fusion.schemes.segment_signature import segment_key, segment_results
from relax_passes.fusion.template_choice import TemplateChoice, TemplateChooser
from relax_passes.ir.bindings import operator, shape_of, static_shape
from relax_passes.ir.operators.grouped_products import GROUPED
from tir_kernels.cuda.device import gpu_of
from tir_kernels.errors import SchemeError

# Operators that begin a kernel of their own under TVM's rules, whatever comes before them.
REDUCTIONS = {"nn.layer_norm", "nn.rms_norm", "nn.softmax", "nn.log_softmax", "nn.group_norm", "mean", "sum", "max"}
REDUCTIONS |= {"min", "prod", "variance", "std", "argmax", "argmin", "cumsum", "cumprod", "take", "gather_elements"}
# Operators that end a kernel: nothing that reads their result joins it.
PLAIN = {"mean", "sum", "max", "min", "prod"}
CLOSED = REDUCTIONS - PLAIN


@dataclass(frozen=True)
class Machine:
    """Rates that TVM's own kernels reach; their ratios decide, not their values.

    Attributes
    ----------
    segment_us : float
        The time between one segment and the next; where two schemes tie, it favours fewer segments.
    launch_us, product_us : float
        The time to start a kernel, and the least time of a matrix product, whose loop along k nothing hides.
    reduction_us : float
        The least time of a plain reduction, whose schedule has few threads.
    bytes_per_us, flops_per_us : float
        The rates of memory and of arithmetic.
    """

    segment_us: float
    launch_us: float
    product_us: float
    reduction_us: float
    bytes_per_us: float
    flops_per_us: float


CPU = Machine(0.01, 1.0, 0.0, 0.0, 2e4, 1e5)
# TVM's own kernels on an H200: their share of the GPU's recorded bandwidth, and the rate of one multiprocessor.
BANDWIDTH_SHARE = 2 / 4.3
MULTIPROCESSOR_FLOPS_PER_US = 3.79e5
MAX_OPERATORS = 48  # in a segment


def machine_of(target: tvm.target.Target) -> Machine:
    """The rates of TVM's own kernels on a target."""
    if target.kind.name != "cuda":
        return CPU
    gpu = gpu_of(target)
    flops_per_us = MULTIPROCESSOR_FLOPS_PER_US * gpu.multiprocessors
    return Machine(0.3, 3.0, 25.0, 4.0, BANDWIDTH_SHARE * gpu.bandwidth, flops_per_us)


class InitialScheme:
    """The scheme of least predicted time, as a function of an OperatorGraph.

    `chooser` knows the target and its kernel templates; without any, segments are what TVM's own rules fuse best.
    """

    def __init__(self, chooser: TemplateChooser):
        self.chooser = chooser
        self.machine = machine_of(chooser.target)
        # The keys are those of segments, so equal layers are judged once.
        self.choices = {}  # key -> TemplateChoice, or None without a template
        self.times = {}

    def __call__(self, graph: OperatorGraph) -> FusionScheme:
        best = [0.0]  # the least time of the operators before each position
        starts = []  # where the last segment of each such optimum starts
        for end in range(1, len(graph.operators) + 1):
            costs = {}
            for start, segment in _legal_segments(graph, end):
                key = segment_key(graph, segment)
                if self._may_propose(graph, segment, key):
                    costs[start] = best[start] + self._predict(graph, segment, key)
            starts.append(min(costs, key=costs.__getitem__))
            best.append(costs[starts[-1]])
        lengths, end = [], len(graph.operators)
        while end:
            lengths.append(end - starts[end - 1])
            end = starts[end - 1]
        return FusionScheme.from_lengths(reversed(lengths))

    def predict(self, graph: OperatorGraph, segment: range) -> float:
        """Predicted microseconds of a segment."""
        return self._predict(graph, segment, segment_key(graph, segment))

    def _predict(self, graph: OperatorGraph, segment: range, key: tuple) -> float:
        if graph.operators[segment.start].kind == ATTENTION:
            return 0.0
        if key not in self.times:
            choice = self._choice(graph, segment, key)
            default = lambda: sum(self._kernel_us(graph, kernel) for kernel in default_kernels(graph, segment))
            self.times[key] = self.machine.segment_us + (default() if choice is None else choice.us)
        return self.times[key]

    def _may_propose(self, graph, segment, key: tuple) -> bool:
        """Whether the scheme may have this segment.

        A template that only a search may choose needs a measured time, unless the segment is a single operator.
        """
        choice = None if graph.operators[segment.start].kind == ATTENTION else self._choice(graph, segment, key)
        is_alone = len(segment) == 1
        return is_alone or choice is None or choice.measured_us is not None or _is_proposed(choice.template)

    def _choice(self, graph, segment, key: tuple) -> TemplateChoice | None:
        if not self.chooser.templates:
            return None
        if key not in self.choices:
            choice = self.chooser.choose(SegmentContents(graph, segment).function(segment_results(graph, segment)))
            self.choices[key] = None if isinstance(choice, str) else choice
        return self.choices[key]

    def _kernel_us(self, graph, kernel: set[int]) -> float:
        machine, read, flops, written = self.machine, {}, 0, 0
        for i in kernel:
            work = _work(graph, i)
            flops += work.flops
            read |= {key: size for key, size, origins in work.reads if not origins & kernel}
            if graph.readers[i] - kernel or i in graph.results:
                written += work.written
        bytes_moved = sum(read.values()) + written
        least_us = machine.reduction_us if any(graph.operators[i].name in PLAIN for i in kernel) else 0.0
        least_us = machine.product_us if any(graph.operators[i].kind == CI for i in kernel) else least_us
        return machine.launch_us + max(least_us, bytes_moved / machine.bytes_per_us, flops / machine.flops_per_us)


@dataclass(frozen=True)
class _Work:
    """Costs of an operator: operations, bytes written, and reads as (what, bytes, operators that it comes from)."""

    flops: int
    written: int
    reads: tuple[tuple[object, int, frozenset[int]], ...]


def _work(graph: OperatorGraph, i: int) -> _Work:
    """The work of an operator, computed once: a graph has thousands of possible segments."""
    if i not in graph.work:
        call = graph.bindings.values[graph.variables[i]]
        reads = []
        for number, tensor in enumerate(_tensors(call)):
            is_variable = isinstance(tensor, relax.Var)
            origins = _indices(graph, [tensor]) if is_variable else frozenset()
            reads.append((tensor if is_variable else (i, number), _bytes(tensor), frozenset(origins)))
        graph.work[i] = _Work(_flops(call), _bytes(graph.variables[i]), tuple(reads))
    return graph.work[i]


def _is_proposed(template) -> bool:
    return getattr(template, "IS_PROPOSED", True)


def default_kernels(graph: OperatorGraph, segment: range) -> list[set[int]]:
    """The kernels that TVM's own rules make of a segment, approximately: a map joins kernels that it alone reads."""
    kernels = []
    for i in segment:
        name = graph.operators[i].name
        sources = [k for k in kernels if k & set(graph.operators[i].inputs) and not _is_closed(graph, k)]
        if graph.operators[i].kind == CI or name in CLOSED:
            sources = []
        elif name in REDUCTIONS:  # maps join it, no other reduction does
            sources = [k for k in sources if _is_map(graph, k)]
        for joined in (sources, sources[-1:]):
            kernel = set().union(*joined, [i])
            products = sum(graph.operators[j].kind == CI for j in kernel)
            if products <= 1 and all(graph.readers[j] <= kernel and j not in graph.results for j in kernel - {i}):
                break
        else:
            joined, kernel = [], {i}
        kernels = [*(k for k in kernels if k not in joined), kernel]
    return kernels


def _is_map(graph, kernel) -> bool:
    operators = [graph.operators[j] for j in kernel]
    return all(operator.kind == MI and operator.name not in REDUCTIONS for operator in operators)


def _is_closed(graph, kernel) -> bool:
    return any(graph.operators[j].name in CLOSED for j in kernel)


def _legal_segments(graph, end: int):
    """(start, segment) of every legal segment that ends before `end`."""
    for start in range(end - 1, max(end - MAX_OPERATORS, 0) - 1, -1):
        segment = range(start, end)
        if sum(graph.operators[i].kind == CI for i in segment) > MAX_CI:
            return
        try:
            check_segment(segment, graph.operators)
        except SchemeError:
            continue
        yield start, segment


def _indices(graph, variables) -> set[int]:
    """The operators that variables are views of."""
    return {graph.index[root] for var in variables for root in graph.roots(var) if root in graph.index}


def _tensors(call: relax.Call) -> list:
    """The tensors that a call reads."""
    arguments = [field for a in call.args for field in (a.fields if isinstance(a, relax.Tuple) else [a])]
    return [a for a in arguments if isinstance(a, relax.Var | GenericConst)]


def _bytes(expr) -> int:
    if isinstance(expr.ty, relax.TupleType):
        return sum(math.prod(int(n) for n in field.shape) * _item_bytes(field.dtype) for field in expr.ty.fields)
    return math.prod(shape_of(expr)) * _item_bytes(expr.ty.dtype)


def _item_bytes(dtype) -> int:
    return (tvm.DataType(str(dtype)).bits + 7) // 8


def _flops(call: relax.Call) -> int:
    """Arithmetic operations: two for each multiplication of a product, one for each element of anything else."""
    shape = static_shape(call)
    if shape is None:
        return 0
    if operator(call) == "matmul" or operator(call) in GROUPED:
        return 2 * math.prod(shape) * shape_of(call.args[0])[-1]
    if operator(call).startswith("nn.conv"):
        return 2 * math.prod(shape) * math.prod(shape_of(call.args[1])[1:])
    return math.prod(shape)
