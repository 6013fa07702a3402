"""Benchmarks: quality of the methods at equal budgets, the papers' claims, and a GPU's times, as measured."""

import streamlit as st

from kvlens.ui import benchview, gpubench, nav

nav.enter()
st.subheader("Benchmarks")
benchview.show_quality()
benchview.show_claims()
gpubench.show_gpu()
