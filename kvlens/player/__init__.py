"""The player without an application: what it is sent of a run, its JavaScript (web/), and one HTML file of both."""
