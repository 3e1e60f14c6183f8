"""An experiment: draw samples that the model predicts badly more often.

    --module loss_sampling --config debugmodel

`LossSampler` replaces the loader's sampler (`dataloader.sampler`); the trainer is the library's, which passes it the
loss of every sample after each step, summed over all ranks. Each rank has a sampler, and all draw the same.

**Distribution.** The chance of a sample is proportional to a power of its recent loss, mixed with a uniform chance. An
unseen sample counts as the mean of the seen ones. One draw, `dataloader.pack_chunk` samples or the rest of the epoch,
has no duplicates. An epoch has one draw per sample: some samples appear more than once in it, and some not at all.

**Lag.** Samples are drawn ahead: a whole chunk, and the batches that `dataloader.num_workers` prepare. Smaller chunks
follow the losses more closely, and pack less densely.

Checkpoints contain the losses, so that a resumed run draws the same samples.

After prioritized experience replay (Schaul et al., arXiv:1511.05952), without its correction for the changed
distribution: the loss in the metrics is higher than the data's. Compare runs by their validation loss.
"""
