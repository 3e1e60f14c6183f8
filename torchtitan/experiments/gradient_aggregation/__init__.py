"""An experiment: the gradient of each micro-batch is clipped before they are averaged.

    --module gradient_aggregation --config debugmodel

The library clips the gradient of the whole step, in which a single bad micro-batch can be most of what is left. Here
each micro-batch, over all data-parallel ranks, has its own gradient, that of its mean loss, scaled down to
`micro_batch_max_norm` where it is longer; the step takes their average, each weighted by its valid tokens. Where none
is longer, that is what the library computes. What `training.max_norm` does with the average is unchanged.

It costs one more copy of the gradients, and one moment per micro-batch at which the host waits for the device. It
works under every kind of parallelism; micro-batches are those of `training.global_batch_size` (gradient accumulation),
so that without accumulation there is one per step.
"""
