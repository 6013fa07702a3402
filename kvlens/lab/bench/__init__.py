"""Measurements of the methods: quality at equal budgets, and the papers' qualitative claims."""
