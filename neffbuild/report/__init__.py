"""The compile-time report, one module per output."""
