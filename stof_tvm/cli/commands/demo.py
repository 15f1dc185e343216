"""`stof demo`: a BERT encoder compiled, verified, timed and saved."""

from stof_tvm.cli.command import new_command, print_answer, show_progress
from stof_tvm.cli.named.models import check_target


def add_command(commands) -> None:
    demo = new_command(
        commands,
        "demo",
        _demo,
        "compile, verify, time and save a BERT encoder with a BigBird mask",
        "stof demo",
    )
    demo.add_argument("--target", help="compilation target; default: the GPU present, else LLVM")


def _demo(arguments) -> None:
    from stof_tvm.demo import demo_text, run_demo

    if arguments.target is not None:
        check_target(arguments.target)

    result = run_demo(arguments.target, progress=show_progress())
    print_answer(arguments, {**result, "report": result["report"].to_dict()}, demo_text(result))
