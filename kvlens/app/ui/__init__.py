"""The dashboard's parts: selection and URL, jobs, cached trace access, widgets, the player. Never imports torch."""
