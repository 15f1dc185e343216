"""`stof report`: what the compiler did with the model of a saved engine."""

from pathlib import Path

from stof_tvm.cli.command import new_command, print_answer


def add_command(commands) -> None:
    report = new_command(
        commands,
        "report",
        _report,
        "show what is in a saved engine, whatever machine it is for",
        "stof report encoder.stof",
        "Runs none of its code.",
    )
    report.add_argument("file", type=Path, help="a saved engine")


def _report(arguments) -> None:
    from stof_tvm.buckets.loaded import read_range_report
    from stof_tvm.saving.artifact import read_report
    from stof_tvm.saving.range_file import is_range_file

    manifest, report = (read_range_report if is_range_file(arguments.file) else read_report)(arguments.file)
    size = arguments.file.stat().st_size
    print_answer(
        arguments,
        {"file": str(arguments.file), "bytes": size, "manifest": manifest, "report": report.to_dict()},
        f"{arguments.file}: {size / 1e6:.1f} MB, by stof_tvm {manifest['project_version']}, TVM "
        f"{manifest['tvm_version']}\n{report}",
    )
