"""Write a step as files that other programs read."""
