"""What a tensor of the state is: its layout, the memory that holds it, and the ranks that share it."""
