"""Serve config and build config: schema, loading, errors."""
