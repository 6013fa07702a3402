"""Runs: what is asked for, carried out, stored and repeated. `kvlens.runs()` lists those that are stored."""

from kvlens.callpackage import callable_package

callable_package(__name__)
