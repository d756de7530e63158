"""neffbuild: compile shape-bucketed decode graphs ahead of time, cache them, serve them warm."""

__version__ = "0.1.0"
