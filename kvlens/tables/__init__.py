"""Recorded tables as frames and exports, of a run or of many, with their data dictionary."""
