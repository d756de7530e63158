"""Compilers: capture → compile → load, one module each."""
