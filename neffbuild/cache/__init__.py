"""Recipes and keys, entries, manifests, tags, and the stores that keep them."""
