"""Studies: prompts under methods, values of their parameters, budgets, forms of the question and seeds. A study is
stored beside the runs that it is made of, can be stopped and goes on where it stopped. `kvlens.studies()` lists those
that are stored."""

from kvlens.callpackage import callable_package

callable_package(__name__)
