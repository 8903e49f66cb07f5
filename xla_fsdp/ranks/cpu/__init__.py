"""How ranks run as threads of one process on CPU (private)."""
