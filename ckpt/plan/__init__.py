"""Pure decisions: which rank writes what (save), what is read (restore), and how fragments
merge.
"""
