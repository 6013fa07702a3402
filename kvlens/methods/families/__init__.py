"""What methods of one kind share: places, budgets, events and the record of their rankings. The method says its
score."""
