"""An experiment: samples that the model predicts badly are drawn more often.

    --module loss_sampling --config debugmodel

`LossSampler` takes the place of the loader's own sampler (`dataloader.sampler`); the trainer is the library's. After
each step the trainer tells it the loss of every sample of the step, summed up over all ranks; each rank has a sampler,
and all of them draw the same.

**What is drawn.** The chance of a sample is proportional to a power of its recent loss, mixed with an even chance for
all. One that has not been seen yet counts as the mean of those that have. Within one draw, which is
`dataloader.pack_chunk` samples or what is left of the epoch, no sample comes twice. An epoch is as many draws as there
are samples: some come more than once in it, and some not at all.

**The lag.** What a step teaches decides what is drawn after it, and samples are drawn ahead: a whole chunk at a time,
and as many batches more as `dataloader.num_workers` prepare. Smaller chunks follow the losses more closely, and pack
less densely.

The losses are in the checkpoint, so that a run that resumes draws what it would have drawn.

After prioritized experience replay (Schaul et al., arXiv:1511.05952), without its correction for the changed
distribution: the loss in the metrics is higher than the data's. Compare runs by their validation loss.
"""
