"""Data that pages need beside traces: query results kept in memory, and the map of span keys that another process
computes. No Streamlit."""
