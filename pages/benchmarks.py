"""Benchmarks: quality of the methods at equal budgets, and the papers' claims, as measured."""

import streamlit as st

from kvlens.ui import benchview, nav

nav.enter()
st.subheader("Benchmarks")
benchview.show_quality()
benchview.show_claims()
