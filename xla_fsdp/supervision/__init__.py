"""What watches over a run while it trains: preemption, divergence (private)."""
