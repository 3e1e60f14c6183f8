"""An experiment: draw samples with a high loss more often.

    --module loss_sampling --config debugmodel

`LossSampler` replaces the loader's sampler (`dataloader.sampler`). After each step, the library's
trainer passes it the loss of every sample, summed over all ranks. Each rank has a sampler, and all
samplers make the same draws.

**Distribution.** The chance of a sample is proportional to a power of its recent loss, mixed with a
uniform chance. An unseen sample gets the mean loss of the seen ones. One draw
(`dataloader.pack_chunk` samples, or the rest of the epoch) has no duplicates. The number of draws
in an epoch is the size of the dataset: some samples appear more than once, some not at all.

**Lag.** Samples are drawn ahead of training: a whole chunk, and the batches that the loader's
workers (`dataloader.num_workers`) prepare. Smaller chunks follow the losses more closely, but pack
less densely.

Checkpoints contain the losses, so that a resumed run draws the same samples.

The method is prioritized experience replay (Schaul et al., arXiv:1511.05952) without its correction
for the changed distribution, so the training loss in the metrics is higher than the mean over the
data. Compare runs by validation loss.
"""
