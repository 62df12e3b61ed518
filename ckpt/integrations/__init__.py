"""One thin file per framework.

None is imported before its own file is, and none is a dependency.
"""
