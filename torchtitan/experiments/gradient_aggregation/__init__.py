"""An experiment: clip the gradient of each micro-batch before averaging.

    --module gradient_aggregation --config debugmodel

The library clips the gradient of the whole step, which one bad micro-batch can dominate. Here the
gradient of each micro-batch's mean loss, over all data-parallel ranks, is scaled down to a norm of
at most `micro_batch_max_norm`; the step averages these gradients, weighted by valid tokens. Without
clipping, the result equals the library's. `training.max_norm` applies to the average as usual.

This costs one more copy of the gradients and one wait for the device per micro-batch. It works
under every kind of parallelism. Micro-batches come from `training.global_batch_size` (gradient
accumulation); without accumulation, there is one per step.
"""
