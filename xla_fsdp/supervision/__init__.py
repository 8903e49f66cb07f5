"""Monitors a training run: preemption, divergence, profiles (private)."""
