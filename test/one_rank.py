"""What Python keeps once a process, such as where warnings go, for ranks that are its threads."""

import threading

# ``with one_rank:`` around ``pytest.warns`` in a function of ranks: without it a rank that leaves
# takes the warnings of one that is still inside. Nothing that waits for other ranks goes inside.
one_rank = threading.Lock()
