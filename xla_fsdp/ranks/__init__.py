"""How ranks start: on a TPU as processes, on a CPU as threads of one."""
