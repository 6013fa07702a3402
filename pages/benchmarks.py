"""Benchmarks as measured: needle grids with the way to a lost trial, quality at equal budgets, the papers' claims, a GPU's times."""

import streamlit as st

from kvlens.ui import benchview, gpubench, gridview, nav

nav.enter()
st.subheader("Benchmarks")
gridview.show_grid()
benchview.show_quality()
benchview.show_claims()
gpubench.show_gpu()
