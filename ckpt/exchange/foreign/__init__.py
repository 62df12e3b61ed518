"""Import checkpoints of other programs, or adopt them where they are."""
