"""Makes the report of a run at any time, also of one that is training or has crashed.

    python tools/report.py runs/quickstart/ppo
    python tools/report.py runs/new --against runs/old     overlaid curves, changed settings
    python tools/report.py runs/long --steps 1200-1400     every step of a part of a long run

Exit status: 0, or 2 with one line for wrong input. docs/monitoring.md describes the page.
"""

import argparse
import sys
from pathlib import Path

from megarl.errors import ArgumentParser, UsageError
from megarl.extras.report import page_of, report_data, write_report
from megarl.observe.files import write_atomically
from megarl.observe.metrics_file import FILE_NAME


def _steps(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise UsageError(f"--steps {text}: allowed is FIRST-LAST, as 100-200")
    return int(first), int(last)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked. Raises UsageError."""
    parser = ArgumentParser(prog="report", allow_abbrev=False,
                            description="Makes the report of a run, which may still be training.")  # fmt: skip
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, which holds metrics.jsonl")
    parser.add_argument("--against", type=Path, metavar="RUN", help="another run: overlaid curves, changed settings")
    parser.add_argument("--steps", metavar="FIRST-LAST", help="steps that the report covers; default: all")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write the page; default: report.html, and "
                        "report.png, in RUN, or report-against-NAME.html with --against")  # fmt: skip
    arguments = parser.parse_args(argv)
    arguments.steps = _steps(arguments.steps) if arguments.steps else None
    for flag, folder in (("RUN", arguments.run), ("--against", arguments.against)):
        if folder is not None and not (folder / FILE_NAME).is_file():
            raise UsageError(f"{flag} {folder}: not the folder of a run, it has no {FILE_NAME}")
    if arguments.against and arguments.against.resolve() == arguments.run.resolve():
        raise UsageError(f"--against {arguments.against}: allowed is another run than {arguments.run}")
    if arguments.out and not arguments.out.parent.is_dir():
        raise UsageError(f"--out {arguments.out}: no such folder {arguments.out.parent}")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status: 0, or 2 with one line on stderr for wrong input."""
    try:
        arguments = parse_arguments(argv)
        run, against = arguments.run, arguments.against
        if against is None and arguments.steps is None and arguments.out is None:
            paths = write_report(run)
        else:
            name = f"report-against-{against.resolve().name}.html" if against else "report.html"
            paths = (arguments.out or run / name,)
            write_atomically(paths[0], page_of(report_data(run, against, arguments.steps)))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(str(path) for path in paths))
    return 0


if __name__ == "__main__":
    sys.exit(main())
