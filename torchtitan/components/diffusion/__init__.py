"""Generation by flow matching: the loss and the sampler, for any model of velocities."""
