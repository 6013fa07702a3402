"""A run, or two runs beside each other, as one self-contained HTML page to hand to somebody who has no kvlens."""

from kvlens.app.report.page import report_bytes

__all__ = ["report_bytes"]
