"""Pure figure builders: arrays and data frames in, Plotly figures out. No Streamlit, no SQL."""
