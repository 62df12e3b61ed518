"""Pure functions that decide which boxes a rank writes in a save, which chunks it reads in a
restore, and how the fragments of all ranks are merged.
"""
