"""Shapes, ladders, grid expansion, shape selection and coverage: pure rules, no torch, no I/O."""
