"""Pure decisions: who writes what where (save), what to read for what is wanted (restore), how fragments become a manifest (merge)."""
