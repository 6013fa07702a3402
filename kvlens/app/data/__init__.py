"""Data that pages need beside traces: query results kept in memory, and the map of span keys, which a process of its own
computes. No Streamlit."""
