"""Tables, the transactions on them as plain functions, and what runs these."""
