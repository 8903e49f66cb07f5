"""Ranks in processes of their own that do not go on: which one keeps the others waiting, and where.

A thread beside each rank looks now and then how far its process is (``waits.py``) and leaves that
in the ranks' store. One of them, the watcher, reads what all have left. Programs hold ranks
together, so that one that hangs stops all of them: when nothing has moved in any process for the
timeout, the watcher asks all ranks for their stacks and prints them (``watcher.py``).

A rank that keeps Python's lock stops its own thread, too, and gives no sign of life. Its neighbours
on the same host then get its stack by a signal, whose handler is faulthandler's, in C. If it is the
watcher that is silent, another one takes its place.
"""
