"""The report of one run or of several: a page, and the same numbers for a terminal and for RESULTS.md."""

from adambs.lab.report.tables import terminal_table
from adambs.lab.report.writing import write_report

__all__ = ["terminal_table", "write_report"]
