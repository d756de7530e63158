"""Where compiles run: the schedule, the executor, the worker, what became of each unit."""
