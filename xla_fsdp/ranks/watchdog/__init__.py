"""Finds the rank that hangs, for ranks in separate processes, and the place where it hangs.

A thread of each rank regularly measures the progress of its process (``waits.py``) and writes it to
the ranks' store. One of these threads, the watcher, reads the progress of all ranks. Collectives
connect the ranks, so one rank that hangs stops all of them. When no process has made progress for
the timeout, the watcher requests the stacks of all ranks and prints them (``report.py``).

A rank that holds Python's GIL also stops its watchdog thread, and gives no sign of life. Other
processes on the same host then get its stack by a signal, whose handler is faulthandler's, in C. If
the watcher is silent, another rank takes its place.
"""
