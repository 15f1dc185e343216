"""A system on a case, in one process of each rank: made ready, checked against a wider dtype, then timed."""

import statistics
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from benchmarks.parallel.cases import BERT, Case
from benchmarks.parallel.model import divided_by_pytorch, inputs_of, model_of, widely

SINGLE = ("stof-1", "compile-sdpa-1")
SYSTEMS = ("stof-1", "stof", "compile-dtensor", "compile-sdpa-1")
SAMPLES = 7
CALLS = {False: 3, True: 20}  # in a sample, of a prompt and of a token
LEAST_ERROR = 1e-5  # of float32, below which no system is called wrong
TIMEOUT = timedelta(minutes=20)


def get_ready(case: Case, system: str, rank: int, ranks: int, meeting: str, device: str, threads: int, verify: bool):
    """(fields of the row, a function that measures the others), as benchmarks.models.worker asks for them.

    The ranks of a system get ready at the same time and meet by the file `meeting`; on "cuda" rank r has the r-th GPU.
    """
    torch.set_num_threads(threads)
    if device == "cuda":
        torch.cuda.set_device(rank)
    mesh = None
    if system not in SINGLE:
        from torch.distributed.device_mesh import init_device_mesh

        # Not by the environment, where torchrun has the store of the processes that plan.
        backend = "nccl" if device == "cuda" else "gloo"
        store = dist.FileStore(meeting, ranks)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
        mesh = init_device_mesh(device, (ranks,))
    model, inputs = model_of(case, device), inputs_of(case, device)
    expected = widely(model, inputs, case)
    half_error = max(_distance(model(*inputs), expected), LEAST_ERROR if case.dtype == "float32" else 0.0)
    make = _stof if system.startswith("stof") else _by_pytorch
    call, notes = make(model, inputs, mesh, device, verify)
    del model
    error = largest(_distance(call(), expected), device)
    if device == "cuda":
        torch.cuda.empty_cache()  # processes share the GPU's memory
    fields = {"gpus": ranks, "notes": notes, "error": error, "half_error": half_error}
    if system.startswith("stof"):
        fields |= {"predicted": predicted(case, ranks, device)}
    return fields, lambda: times(call, device, CALLS[case.cache > 0])


def _stof(model, inputs: tuple, mesh, device: str, verify: bool):
    import stof_tvm

    # A dry run computes little, and most of its time would be LLVM's optimizer.
    target = {"kind": "llvm", "opt-level": 0} if device == "cpu" else None
    engine = stof_tvm.build(model, target, inputs, mesh=mesh, verify=verify)
    engine.reuse_outputs = True
    return lambda: engine(*inputs), list(engine.report().notes)


def _by_pytorch(model, inputs: tuple, mesh, device: str, verify: bool):
    if mesh is not None:
        model = divided_by_pytorch(model, mesh)
    compiled = torch.compile(model) if device == "cuda" else model
    call, how = captured(lambda: compiled(*inputs), device)
    return call, [how]


def captured(call, device: str) -> tuple:
    """(the call as a replay of a CUDA graph where it can be captured, how it runs)."""
    if device == "cpu":
        return call, "as it is"
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = call()
    except Exception as error:
        torch.cuda.synchronize()
        return call, f"without a CUDA graph: {type(error).__name__}"

    def replay(_kept=call):  # the graph does not keep the model's weights
        graph.replay()
        return result

    return replay, "replays of a CUDA graph"


def _distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference; NaN where one is."""
    return (actual.to(expected.dtype) - expected).abs().max().item()


def largest(value: float, device: str) -> float:
    """The largest of all ranks' values, NaN if one is."""
    if not dist.is_initialized():
        return value
    values = [torch.zeros(1, dtype=torch.float64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(values, torch.tensor([value], dtype=torch.float64, device=device))
    return torch.cat(values).max().item()  # NaN where one is


def times(call, device: str, calls: int) -> dict:
    """Microseconds of a call: SAMPLES times the mean of some in a row, of the slowest rank, all starting together."""
    samples = []
    for number in range(SAMPLES + 1):
        if dist.is_initialized():
            dist.barrier()
        us = _in_a_row(call, device, calls if number else 3)
        if number:  # the first ones warm up
            samples.append(round(largest(us, device), 1))
    return {"median_us": statistics.median(samples), "samples_us": samples}


def _in_a_row(call, device: str, calls: int) -> float:
    if device == "cpu":
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - begin) * 1e6 / calls
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    for _ in range(calls):
        call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) * 1000 / calls


def predicted(case: Case, ranks: int, device: str) -> dict | None:
    """What `stof plan` says of tensor parallelism: µs of a call, and its advice; None for a token, and on a CPU."""
    if device == "cpu" or case.cache:
        return None
    from stof_tvm import masks
    from stof_tvm.parallel.planning.advice import advice
    from stof_tvm.parallel.planning.links import Links
    from stof_tvm.parallel.planning.meshes import Simulation, meshes
    from stof_tvm.parallel.planning.model import PlannedModel
    from tir_kernels.target import parse_target

    mask = masks.sliding_window(case.window) if case.window else masks.causal()
    heads = case.heads, case.kv_heads, case.dim // case.heads
    gated = case.model != BERT
    model = PlannedModel(case.q_len, case.batch, case.layers, *heads, case.dim, case.hidden, gated, case.dtype)
    simulation = Simulation(mask, model, parse_target(None), Links())
    us = 1000 * simulation.on(ranks, 1).total_ms
    return {"us": us, "advice": advice([simulation.on(*mesh) for mesh in meshes(model, ranks)], ranks)}
