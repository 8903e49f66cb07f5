"""How ranks start: as processes on a TPU, as threads of one process on a CPU."""
