"""From a program to what the TPU compiler makes of it."""
