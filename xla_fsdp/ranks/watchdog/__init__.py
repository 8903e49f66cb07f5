"""Finds the rank that hangs, for ranks in separate processes, and the place where it hangs.

A thread of each rank writes the progress of its process (``waits.py``) to the ranks' store. One of
them, the rank on duty, reads the progress of all. When no process has made progress for the
timeout, it requests the stacks of all ranks and prints them (``report.py``). A rank that holds the
GIL cannot answer, so another process of its host gets its stack by a signal to faulthandler.
"""
