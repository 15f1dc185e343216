"""What predictions for meshes come to: which mesh to take, and whether tensor parallelism gains anything."""

from stof_tvm.parallel.planning.meshes import MeshTimes

GAINS = 0.7  # efficiency below which a mesh gains little


def advice(found: list[MeshTimes], gpus: int) -> str:
    """One or two sentences about the predictions for all meshes of so many GPUs, at least one of them.

    A mesh that uses less than `GAINS` of its GPUs is not proposed where copies of the model serve as many requests.
    """
    best = min(found, key=lambda mesh: mesh.total_ms)
    if gpus == 1:
        return "one GPU: there is nothing to share out"
    copies = f"a copy of the model on each GPU serves {gpus}× the requests"
    tensor = [mesh for mesh in found if mesh.tensor > 1]
    most = max(tensor, key=lambda mesh: mesh.efficiency, default=None)
    if most is not None and most.efficiency < GAINS and best.tensor == 1:
        return (
            f"too small to gain from tensor parallelism: {_called(most)} is {most.speedup:.2f}× one GPU, and its "
            f"sums take {most.reduce_us:.0f} of the {most.layer_us:.0f} µs of a layer; instead, {copies}, or "
            f"{_called(best)} is {best.speedup:.2f}×"
        )
    if best.efficiency >= GAINS:
        return f"take {_called(best)}: {best.speedup:.2f}× one GPU"
    return f"{copies}; for one request {_called(best)} is fastest, {best.speedup:.2f}× one GPU"


def _called(mesh: MeshTimes) -> str:
    if mesh.tensor == 1:
        return f"the sequence cut among {mesh.context} ranks"
    if mesh.context == 1:
        return f"tensor parallelism of {mesh.tensor}"
    return f"tensor parallelism of {mesh.tensor} with the sequence cut among {mesh.context} groups"
