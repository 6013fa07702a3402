"""Two tiers of KV memory: slots, tables, transfers, the ledger and the budget account. The only place where KV
moves."""
