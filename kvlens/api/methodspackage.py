"""`kvlens.methods` as a type checker sees it: the package, and the function that it is when called.

Nothing imports this file at run time. A checker knows no callable package, so that it is told of an object with the
attributes of the package that the product and its users read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper

    import pandas as pd

    import kvlens.methods as package
    from kvlens.api.catalogue import methods as table
    from kvlens.methods.base import Method

    class MethodsPackage:
        """The package kvlens.methods."""

        ANSWERING, DEFAULT, LOSING, REFERENCE = package.ANSWERING, package.DEFAULT, package.LOSING, package.REFERENCE
        BUILT_IN: dict[str, str]
        UnknownMethod = package.UnknownMethod
        catalogue = staticmethod(package.catalogue)
        converted = staticmethod(package.converted)
        entry = staticmethod(package.entry)
        forget = staticmethod(package.forget)
        get = staticmethod(package.get)
        make_parameters = staticmethod(package.make_parameters)
        of_family = staticmethod(package.of_family)
        refused = staticmethod(package.refused)
        register = staticmethod(package.register)
        registry: _lru_cache_wrapper[dict[str, type[Method]]]

        def __call__(self, family: str | None = None) -> pd.DataFrame:
            """Return the table of methods, of one family or of all."""
            return table(family)

    methods = MethodsPackage()
