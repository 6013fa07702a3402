"""Studies: prompts under methods, values of their parameters, budgets, forms of the question and seeds. A study is
stored beside the runs that it is made of, can be stopped and goes on where it stopped."""
