"""Two tiers of KV memory: slots of the device, spans in host memory, recalls and evictions. The only place where KV
moves."""
