"""`stof plan`: what a model with a mask is predicted to take on many GPUs, for each mesh of tensor × context ranks."""

from stof_tvm.cli.command import new_command, positive, print_answer, usage
from tir_kernels.errors import InputError

DTYPES = ("bfloat16", "float16", "float32")
MOST_GPUS = 4096


def add_command(commands) -> None:
    plan = new_command(
        commands,
        "plan",
        _plan,
        "predicted times, bytes and balance of a mask on many GPUs",
        'stof plan --gpus 8 --mask "a_shape(64, 4096)" --length 131072 --heads 32 --kv-heads 8',
        "Sequences are cut by the mask's own lists; times come from the model that chooses kernels, and from what "
        "links were measured to take. Nothing runs, and no GPU is needed.",
    )
    plan.add_argument("--gpus", type=positive, required=True, help="number of GPUs")
    plan.add_argument("--mask", required=True, help="as stof mask takes it")
    plan.add_argument("--length", type=positive, required=True, help="number of tokens of a sequence")
    plan.add_argument("--batch", type=positive, default=1, help="sequences of a call (default: %(default)s)")
    plan.add_argument("--layers", type=positive, default=1, help="layers of the model (default: %(default)s)")
    plan.add_argument("--heads", type=positive, default=32, help="query heads (default: %(default)s)")
    plan.add_argument("--kv-heads", type=positive, help="key heads (default: as many)")
    plan.add_argument("--head-dim", type=positive, default=128, help="size of a head (default: %(default)s)")
    plan.add_argument("--hidden", type=positive, help="width of the model (default: heads × head-dim)")
    plan.add_argument("--intermediate", type=positive, help="width of the MLP (default: 4 × hidden)")
    plan.add_argument("--gated", action="store_true", help="an MLP with a gate: three matrices instead of two")
    plan.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="(default: %(default)s)")
    plan.add_argument("--target", default="cuda -arch=sm_90a", help="the GPUs' target (default: %(default)s, an H200)")
    plan.add_argument("--host-gpus", type=positive, default=8, help="GPUs of a host (default: %(default)s)")
    plan.add_argument(
        "--network-gbs",
        type=positive,
        default=50,
        metavar="GB/S",
        help="what each GPU sends between hosts, an assumption (default: %(default)s)",
    )


def _plan(arguments) -> None:
    with usage():  # arguments are all that it looks at
        answer, one, found = _planned(arguments)
    print_answer(arguments, answer, _text(answer, one, found))


def _planned(arguments) -> tuple:
    """(the answer, the simulation of one GPU, those of the meshes)."""
    from stof_tvm.cli.named.masks import mask_of
    from stof_tvm.parallel.planning.advice import advice
    from stof_tvm.parallel.planning.links import Links
    from stof_tvm.parallel.planning.meshes import Simulation, left_out, meshes
    from tir_kernels.target import parse_target

    if arguments.gpus > MOST_GPUS:
        raise InputError(f"--gpus {arguments.gpus} is more than {MOST_GPUS}")
    mask, model = mask_of(arguments.mask), _model(arguments)
    target = parse_target(arguments.target)
    if target.kind.name != "cuda":
        raise InputError(f"--target {arguments.target} is no GPU")
    links = Links(arguments.host_gpus, arguments.network_gbs * 1e3)
    simulation = Simulation(mask, model, target, links)
    found = [simulation.on(*mesh) for mesh in meshes(model, arguments.gpus)]
    if not found:
        raise InputError(
            f"no mesh of {arguments.gpus} GPUs: tensor ranks divide the {model.kv_heads} key heads and the MLP's "
            f"{model.intermediate}, and each context rank has 8 tokens at least"
        )
    one = simulation.on_one()
    answer = {
        "mask": repr(mask),
        "length": model.length,
        "gpus": arguments.gpus,
        "target": str(target.attrs["arch"]),
        "one_gpu": one.to_dict(),
        "meshes": [mesh.to_dict() for mesh in found],
        "left_out": left_out(model, arguments.gpus),
        "advice": advice(found, arguments.gpus),
    }
    return answer, one, found


def _model(arguments):
    from stof_tvm.parallel.planning.model import PlannedModel

    hidden = arguments.hidden or arguments.heads * arguments.head_dim
    return PlannedModel(
        length=arguments.length,
        batch=arguments.batch,
        layers=arguments.layers,
        q_heads=arguments.heads,
        kv_heads=arguments.kv_heads or arguments.heads,
        head_dim=arguments.head_dim,
        hidden=hidden,
        intermediate=arguments.intermediate or 4 * hidden,
        gated=arguments.gated,
        dtype=arguments.dtype,
    )


COLUMNS = (
    "tensor × context", "tokens a rank", "off balance", "received MiB", "attention µs", "exchange µs", "products µs",
    "norms µs", "all-reduce µs", "total ms", "speedup", "efficiency",
)  # fmt: skip


def _text(answer: dict, one, found: list) -> str:
    rows = [COLUMNS]
    for mesh in [one, *(mesh for mesh in found if mesh is not one)]:
        least, most = mesh.tokens
        rows.append(
            (
                f"{mesh.tensor} × {mesh.context}",
                str(most) if least == most else f"{least}–{most}",
                f"{mesh.imbalance:.1%}",
                f"{mesh.received_bytes / 2**20:.1f}",
                f"{mesh.own_us + mesh.received_us:.0f}",
                f"{mesh.exchange_us + mesh.copies_us:.0f}",
                f"{mesh.products_us:.0f}",
                f"{mesh.norms_us:.0f}",
                f"{mesh.reduce_us:.0f}",
                f"{mesh.total_ms:.2f}",
                f"{mesh.speedup:.2f}×",
                f"{mesh.efficiency:.0%}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    head = f"{answer['mask']}, {answer['length']} tokens, {answer['gpus']} GPUs ({answer['target']}), predicted a layer"
    notes = [f"no {name}: {reason}" for name, reason in answer["left_out"].items()]
    return "\n".join([head, *lines, *notes, answer["advice"]])
