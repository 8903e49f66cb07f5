"""Modules that know of sharding."""
