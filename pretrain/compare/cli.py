"""``fmoe compare``: final losses of runs, and how soon one reaches another's final loss."""

import json
import os
import sys
from pathlib import Path

from fmoe.cli import Parser
from fmoe.errors import UserError, printable
from pretrain.compare import figure, table
from pretrain.compare.groups import group_runs
from pretrain.compare.runs import check_comparable, read_run


def main(argv: list[str]) -> int:
    """Compare the validation losses of runs, print tables or JSON, and return 0; see docs/pretraining.md.

    Raises:
        UserError: a folder is given twice, is damaged, is not a run's or has no validation; losses are not comparable;
            or the figure cannot be written.
    """
    parser = Parser(
        prog="fmoe compare",
        description="Final validation losses of runs, and the steps and tokens at which one reaches the final loss of "
        "another. Runs that differ only in their seed share a row: mean, standard deviation, lowest and highest loss.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, finished or not")
    parser.add_argument("--json", action="store_true", help="print everything as JSON, including the curves")
    parser.add_argument("--out", type=Path, metavar="FILE", help="plot the curves to a .svg or .png file")
    arguments = parser.parse_args(argv)
    if arguments.out is not None:
        figure.check_path(arguments.out)
    seen: set[str] = set()
    for folder in arguments.runs:
        path = os.path.realpath(folder)
        if path in seen:
            raise UserError(f"{folder} is given twice")
        seen.add(path)
    runs = [read_run(folder) for folder in arguments.runs]
    check_comparable(runs)
    groups = group_runs(runs)
    if arguments.json:
        print(json.dumps(table.values(groups), indent=1, allow_nan=False))
    else:
        print("\n".join(map(printable, table.text(groups).split("\n"))))
    if arguments.out is not None:
        figure.draw(groups, arguments.out)
        print(f"curves: {arguments.out}", file=sys.stderr)
    return 0
