"""The exchange of files between nodes with local tiers of their own: the node survey, the server
that gives a node's files to other nodes, and the copies on buddies.
"""
