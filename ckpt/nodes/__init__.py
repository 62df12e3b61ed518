"""Several nodes with local tiers of their own: what each node has, and a server that gives it to
the others.
"""
