"""The exchange of files between nodes with local tiers of their own.

The package contains the node survey, the server from which other nodes read a node's files, and
the copies of each node's files on its buddies.
"""
