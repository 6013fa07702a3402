"""The run of the toy that tests of the API look at: it loses the sample prompt's answer."""

METHOD, BUDGET, NEW = "streaming_llm", "20%", 12
