"""Read the weights of a checkpoint without a model, once or as a job goes on."""
