"""Long fuzzing of the simulator; see `fuzz.__main__`."""
