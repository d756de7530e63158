"""The caches of others: how engines lay out what they compiled, read and written as they do it."""
