"""``fmoe report``: runs as one HTML file, or followed live in the browser.

* `runs` reads run folders, and `record` aggregates their metrics.
* `payload` packs the runs, and `page` embeds the payload in HTML.
* `live` serves the page while runs are training.
* ``assets/`` has the page's scripts and style, and uPlot.
"""

from pretrain.report.page import REPORT, write_report

__all__ = ["REPORT", "write_report"]
