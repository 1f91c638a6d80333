"""What a training script wants around the engine: plans of memory and traffic."""
