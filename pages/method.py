"""Method: what the run's method is, and what it decided, in the method's own terms."""

from kvlens.app.ui import method as methodview
from kvlens.app.ui.common import nav, session
from kvlens.app.ui.common.frame import choose_run

nav.enter()
found = choose_run("Method")
if found is not None:
    methodview.show(found[0])
    session.write_url()
