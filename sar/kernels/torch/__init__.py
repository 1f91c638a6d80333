"""The kernels in plain torch: the oracle of the compiled ones, and what runs on GPUs."""
