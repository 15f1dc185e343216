"""The command `stof logs`: list, verify, merge and export tuning logs."""

import argparse
import json
from pathlib import Path


def add_logs_command(commands) -> None:
    """Add the command to those of the parser."""
    logs = commands.add_parser("logs", help="list, verify, merge and export tuning logs")
    actions = logs.add_subparsers(required=True, metavar="ACTION")
    listing = _add_action(
        actions, "list", _list, "show what was tuned and the fastest trials", "stof logs list tuning_logs"
    )
    verify = _add_action(
        actions,
        "verify",
        _verify,
        "rebuild every record's kernel; exit with 1 where one no longer fits",
        "stof logs verify tuning_logs --jobs 8",
    )
    for action in (listing, verify):
        action.add_argument("folder", nargs="?", type=Path, default=Path("tuning_logs"), help="default: tuning_logs")
    verify.add_argument("--jobs", type=_positive, default=1, help="processes that build kernels; default: 1")
    merge = _add_action(
        actions, "merge", _copy, "keep the best of several folders", "stof logs merge a/tuning_logs b --to tuning_logs"
    )
    export = _add_action(
        actions, "export", _copy, "keep the best of one folder", "stof logs export work --to tuning_logs --records 20"
    )
    merge.add_argument("folders", nargs="+", type=Path)
    merge.set_defaults(records=1)
    export.add_argument("folders", nargs=1, type=Path, metavar="folder")
    export.add_argument(
        "--records", type=_positive, default=1, help="of each workload and GPU, from the fastest to the slowest"
    )
    for action in (merge, export):
        action.add_argument("--to", required=True, type=Path, help="a folder that is empty or does not exist")


def _add_action(actions, name: str, run, summary: str, example: str) -> argparse.ArgumentParser:
    description = summary[0].upper() + summary[1:] + "."
    action = actions.add_parser(name, help=summary, description=description, epilog=f"example: {example}")
    action.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    action.set_defaults(run=run)
    return action


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def _list(arguments) -> int:
    from stof_tvm.tuning.log_tools import list_log, open_logs

    logs = open_logs(arguments.folder)
    rows = [row for log in logs for row in list_log(log)]
    schemes = [{"arch": log.folder.name, "graph": key, **vars(x)} for log in logs for key, x in log.schemes.items()]
    if arguments.json:
        print(json.dumps({"workloads": rows, "schemes": schemes}))
        return 0
    for row in rows:
        best = "no time" if row["best_us"] is None else f"{row['best_us']:.2f} µs on {row['gpu']}: {row['decisions']}"
        print(f"{row['arch']}  {row['problem']}\n    {row['trials']} trials, {row['failed']} failed; {best}")
    for row in schemes:
        print(f"{row['arch']}  graph {row['graph']}: scheme {row['scheme']}, {row['us']:.1f} µs on {row['gpu']}")
    return 0


def _verify(arguments) -> int:
    from stof_tvm.tuning.log_tools import open_logs, verify_log

    logs = open_logs(arguments.folder)
    misfits = [row for log in logs for row in verify_log(log, arguments.jobs)]
    if arguments.json:
        print(json.dumps({"misfits": misfits}))
    else:
        for row in misfits:
            print(f"{row['place']} no longer fits: {row['reason']}")
        print(f"{len(misfits)} records no longer fit")
    return 1 if misfits else 0


def _copy(arguments) -> int:
    from stof_tvm.tuning.log_tools import copy_best

    written = copy_best(arguments.folders, arguments.to, arguments.records)
    text = f"{written} records in {arguments.to}"
    print(json.dumps({"records": written, "folder": str(arguments.to)}) if arguments.json else text)
    return 0
