"""Read single files of other programs as inert data: nothing in them is run."""
