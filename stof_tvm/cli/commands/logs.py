"""`stof logs`: list, verify, merge and export tuning logs."""

from pathlib import Path

from stof_tvm.cli.command import help_text, new_command, positive, print_answer, show_help


def add_command(commands) -> None:
    summary = "list, verify, merge and export tuning logs"
    logs = commands.add_parser("logs", help=summary, **help_text(summary, "stof logs list tuning_logs"))
    logs.set_defaults(run=show_help(logs))
    actions = logs.add_subparsers(metavar="ACTION")
    listing = new_command(
        actions, "list", _list, "show what was tuned and the fastest trials", "stof logs list tuning_logs"
    )
    verify = new_command(
        actions,
        "verify",
        _verify,
        "rebuild every record's kernel; exit with 1 where one no longer fits",
        "stof logs verify tuning_logs --jobs 8",
    )
    for action in (listing, verify):
        action.add_argument("folder", nargs="?", type=Path, default=Path("tuning_logs"), help="default: tuning_logs")
    verify.add_argument("--jobs", type=positive, default=1, help="processes that build kernels; default: 1")
    merge = new_command(
        actions, "merge", _copy, "keep the best of several folders", "stof logs merge a/tuning_logs b --to tuning_logs"
    )
    export = new_command(
        actions, "export", _copy, "keep the best of one folder", "stof logs export work --to tuning_logs --records 20"
    )
    merge.add_argument("folders", nargs="+", type=Path)
    merge.set_defaults(records=1)
    export.add_argument("folders", nargs=1, type=Path, metavar="folder")
    export.add_argument(
        "--records", type=positive, default=1, help="of each workload and GPU, from the fastest to the slowest"
    )
    for action in (merge, export):
        action.add_argument("--to", required=True, type=Path, help="a folder that is empty or does not exist")


def _list(arguments) -> None:
    from stof_tvm.tuning.logs.tools import list_log, open_logs

    logs = open_logs(arguments.folder)
    rows = [row for log in logs for row in list_log(log)]
    found = [(log, key, record) for log in logs for key, records in log.schemes.items() for record in records]
    schemes = [{"arch": log.folder.name, "graph": key, **vars(record)} for log, key, record in found]
    lines = []
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        best = "no time" if row["best_us"] is None else f"{row['best_us']:.2f} µs on {row['gpu']}"
        trials = (
            f"{row['trials']} trial" + "s" * (row["trials"] > 1) + f", {row['failed']} failed" * (row["failed"] > 0)
        )
        lines.append(f"{row['arch']}  {row['name']:<{width}}  {best}  {trials}  {row['choice'] or ''}".rstrip())
    for row in schemes:
        scheme = f"scheme {row['scheme']}, {row['us']:.1f} µs on {row['gpu']}"
        lines.append(f"{row['arch']}  graph {row['graph']}: {scheme}")
    print_answer(arguments, {"workloads": rows, "schemes": schemes}, "\n".join(lines))


def _verify(arguments) -> int:
    from stof_tvm.tuning.logs.tools import open_logs, verify_log

    logs = open_logs(arguments.folder)
    misfits = [row for log in logs for row in verify_log(log, arguments.jobs)]
    lines = [f"{row['location']} no longer fits: {row['reason']}" for row in misfits]
    print_answer(arguments, {"misfits": misfits}, "\n".join([*lines, f"{len(misfits)} records no longer fit"]))
    return 1 if misfits else 0


def _copy(arguments) -> None:
    from stof_tvm.tuning.logs.tools import copy_best

    written = copy_best(arguments.folders, arguments.to, arguments.records)
    data = {"records": written, "folder": str(arguments.to)}
    print_answer(arguments, data, f"{written} records in {arguments.to}")
