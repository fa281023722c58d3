"""``fmoe report``: runs as one HTML file, or followed live in the browser.

`record` aggregates a metrics.jsonl, `runs` reads run folders, `payload` packs the runs, `page` embeds the payload in
HTML, and `live` serves it while runs are training. ``assets/`` has the page's scripts and style, and uPlot.
"""

from pretrain.report.page import REPORT, write_report

__all__ = ["REPORT", "write_report"]
