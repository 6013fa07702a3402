"""Two tiers of KV memory: slots, tables, transfers, the transfer log and the budget account. The only place where KV
moves."""
