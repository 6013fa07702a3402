"""Benchmarks as measured: needle grids with the way to a lost trial, quality at equal budgets, how often the lens is right, the papers'
claims, a GPU's times."""

import streamlit as st

from kvlens.ui import benchview, explainview, gpubench, gridview, nav

nav.enter()
st.subheader("Benchmarks")
gridview.show_grid()
benchview.show_quality()
explainview.show_explain()
benchview.show_claims()
gpubench.show_gpu()
