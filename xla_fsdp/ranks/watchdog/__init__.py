"""Finds the rank that hangs, for ranks in separate processes, and the place where it hangs.

A thread of each rank writes its progress to the ranks' store. The rank on duty reads all of it and,
without progress for the timeout, requests and prints all stacks. If a rank holds the GIL, another
process of its host gets its stack by a signal to faulthandler.
"""
