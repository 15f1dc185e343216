"""`stof build`: compile a model into a file that `stof_tvm.load` reads."""

import time
from pathlib import Path

from stof_tvm.cli.command import check_output, new_command, print_answer, show_progress
from stof_tvm.cli.measuring.lengths import length_range
from stof_tvm.cli.named.models import add_model_arguments, load_call
from tir_kernels.cuda.float32.modes import MODES


def add_command(commands) -> None:
    build = new_command(
        commands,
        "build",
        _build,
        "compile a model, save the engine and report what became of its attentions",
        'stof build my_models:encoder encoder.stof --mask "sliding_window(64)"',
    )
    add_model_arguments(build)
    build.add_argument("file", type=Path, help="where the engine is saved")
    build.add_argument("--strict", action="store_true", help="fail where an attention stays dense")
    build.add_argument("--float32", choices=MODES, default="ieee", help="how a GPU multiplies float32 (default: ieee)")
    build.add_argument("--fusion-scheme", metavar="SCHEME", help="digits or hexadecimal, as the report shows it")
    logs = build.add_mutually_exclusive_group()
    logs.add_argument("--tuning-logs", metavar="FOLDER", help="logs to replay (default: tuning_logs, where it is)")
    logs.add_argument("--no-tuning-logs", dest="tuning_logs", action="store_false", help="replay no logs")
    build.add_argument(
        "--lengths",
        type=length_range,
        metavar="LEAST:MOST",
        help="compile for a range of lengths (the second dimension) instead of the example's shapes",
    )
    build.set_defaults(tuning_logs=None)


def _build(arguments) -> None:
    from stof_tvm.cli.measuring.range_times import call_within, dynamic_shapes
    from stof_tvm.compiler import build

    check_output(arguments.file)
    model, inputs, mask = load_call(arguments.model, arguments)
    shapes = None
    if arguments.lengths is not None:
        args, kwargs, own = call_within(model, inputs, arguments.lengths)
        inputs = kwargs or args
        shapes = dynamic_shapes(inputs, own, arguments.lengths)
    started = time.perf_counter()
    engine = build(
        model,
        arguments.target,
        inputs,
        mask,
        strict=arguments.strict,
        fusion_scheme=arguments.fusion_scheme,
        tuning_logs=arguments.tuning_logs,
        progress=show_progress(),
        float32=arguments.float32,
        dynamic_shapes=shapes,
    )
    seconds = time.perf_counter() - started
    engine.save(arguments.file)  # compiles what was to be compiled at a first call
    saving = time.perf_counter() - started - seconds
    report, size = engine.report(), arguments.file.stat().st_size
    print_answer(
        arguments,
        {
            "file": str(arguments.file),
            "bytes": size,
            "build_seconds": seconds,
            "save_seconds": saving,
            "report": report.to_dict(),
        },
        f"{report}\nbuilt in {seconds:.1f} s, saved in {saving:.1f} s; {arguments.file}: {size / 1e6:.1f} MB",
    )
