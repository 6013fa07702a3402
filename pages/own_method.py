"""Own method: a Python file on this machine that holds a method, checked by the truths of every run."""

from kvlens.app.ui.common import nav
from kvlens.app.ui.ownmethod import view

nav.enter()
view.show()
