"""Two runs beside each other, and many runs as points: what differs, where they part, what each cost. No Streamlit, no
torch."""
