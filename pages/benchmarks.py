"""Benchmarks as measured: needle grids with the way to a lost trial, quality at equal budgets, how often the lens is
right, the papers' claims, a GPU's times."""

import streamlit as st

from kvlens.ui.benchmarks import benchview, gridview
from kvlens.ui.benchmarks import explain as explainview
from kvlens.ui.benchmarks import gpu as gpubench
from kvlens.ui.common import nav

nav.enter()
st.subheader("Benchmarks")
gridview.show_grid()
benchview.show_quality()
explainview.show_explain()
benchview.show_claims()
gpubench.show_gpu()
