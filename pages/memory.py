"""Memory: what each tier held, what moved and when, where each span lay, what was moved and not used; export for
Perfetto."""

from kvlens.app.ui.benchmarks.gpu import show_bus
from kvlens.app.ui.common import nav, session
from kvlens.app.ui.common.frame import choose_run
from kvlens.app.ui.memory import view as memoryview

nav.enter()
found = choose_run("Memory")
if found is not None:
    query = memoryview.show(*found)
    show_bus()
    session.write_url(query)
