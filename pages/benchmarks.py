"""Benchmarks as measured: right answers against bytes, needle grids with the way to a lost trial, quality at equal
budgets, how often the lens is right, the papers' claims, a GPU's times."""

import streamlit as st

from kvlens.app.ui.benchmarks import benchview, gridview, leading, matrix
from kvlens.app.ui.benchmarks import claims as claimsview
from kvlens.app.ui.benchmarks import explain as explainview
from kvlens.app.ui.benchmarks import gpu as gpubench
from kvlens.app.ui.common import nav

nav.enter()
st.subheader("Benchmarks")
look, problems = gridview.look()
model = gridview.choose_model(look, problems)
leading.show_leading(model)
if model is None or gridview.has_sweep(model):
    gridview.show_grid(model, look, problems)
    benchview.show_quality(model)
    matrix.show_matrix(model)
else:  # what there is comes first
    benchview.show_quality(model)
    matrix.show_matrix(model)
    gridview.show_grid(model, look, problems)
explainview.show_explain(model)
claimsview.show_claims(model)
gpubench.show_gpu()
