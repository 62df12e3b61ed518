"""The page that ``ckpt serve`` shows: runs, steps by tier, restores. It is read only.

The server makes all of it, the charts too, so that it needs nothing from the internet. A thread
looks at the stores, and requests are answered from what it has found last.
"""
