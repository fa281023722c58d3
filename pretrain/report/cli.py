"""``fmoe report``: runs as one HTML file, or followed live."""

import sys
from collections.abc import Sequence
from pathlib import Path

from fmoe.cli import Parser
from fmoe.errors import UserError
from pretrain.report.live import ADDRESS, make_server
from pretrain.report.page import REPORT, write_report
from pretrain.report.runs import open_runs


def main(argv: list[str]) -> int:
    """Write the report of runs to a file, or serve it until interrupted, and return 0; see docs/report.md.

    Raises:
        UserError: a folder does not exist or, without ``--live``, has no run with a step; a file is damaged; the output
            file or the port is unavailable; or two options exclude each other.
    """
    parser = Parser(
        prog="fmoe report",
        description="Write one or several runs as one self-contained HTML file, or follow them live in a browser.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, finished or not")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"output file (default: RUN/{REPORT}, or ./{REPORT} for several runs)"
    )
    parser.add_argument("--live", action="store_true", help=f"serve the report on {ADDRESS} and follow the runs")
    parser.add_argument("--port", type=int, help="port for --live (default: a free one)")
    arguments = parser.parse_args(argv)
    if arguments.live:
        if arguments.out is not None:
            raise UserError(f"--out {arguments.out} and --live are mutually exclusive: a live report writes no file")
        return _serve(arguments.runs, arguments.port or 0)
    if arguments.port is not None:
        raise UserError(f"--port {arguments.port} requires --live")
    out = arguments.out or (arguments.runs[0] / REPORT if len(arguments.runs) == 1 else Path(REPORT))
    if out.is_dir():
        raise UserError(f"{out} is a folder: pass a file with --out")
    size = write_report(arguments.runs, out)
    print(f"report: {out}  ({size / 1e3:,.0f} kB)")
    return 0


def _serve(folders: Sequence[Path], port: int) -> int:
    if not 0 <= port < 1 << 16:
        raise UserError(f"--port {port} must be between 0 and 65535")
    with make_server(open_runs(folders), port) as server:
        print(f"report: http://{ADDRESS}:{server.server_port}/  (Ctrl-C to stop)", flush=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
    return 0
