"""Trains a small Llama 3 on the built-in stories with torchtitan's parts in a loop of your own, without its Trainer.

    python plain_loop.py [--steps 100] [--folder outputs/plain_loop] [--dataset my.txt]

Run it again after it was interrupted, and it goes on where it saved last. For one process; edit everything.
"""

import argparse
from functools import partial

import torch

from torchtitan.components.checkpoint import CheckpointManager, ModelState, RandomState
from torchtitan.components.data.dataloader import PretrainDataLoader
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.components.lr_scheduler import LRScheduler
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import Optimizer
from torchtitan.components.profiling import Profiler
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.distributed import initialize_weights
from torchtitan.distributed.gradients import clip_grad_norm
from torchtitan.models.llama3 import model_registry
from torchtitan.tools.device import device_type
from torchtitan.tools.logging import init_logger

SEQ_LEN, BATCH_SIZE, SEED, MAX_NORM = 256, 8, 0, 1.0


class Progress:
    """How far the loop has come; a checkpoint keeps whatever has these two methods."""

    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--folder", default="outputs/plain_loop")
    parser.add_argument("--dataset", default="stories", help="`stories`, or a file or folder of text")
    parser.add_argument("--profile", action="store_true", help="write a trace of every tenth step")
    options = parser.parse_args()
    init_logger()
    torch.manual_seed(SEED)
    device = torch.device(device_type())

    tokenizer = PretrainedTokenizer.Config().build(path="")
    data = PretrainDataLoader.Config(dataset=options.dataset)
    load_data = partial(
        PretrainDataLoader.Config.build, tokenizer=tokenizer, seq_len=SEQ_LEN, local_batch_size=BATCH_SIZE
    )
    loader = load_data(data, seed=SEED)

    model_config = model_registry("debugmodel").model
    model_config.vocab_size = tokenizer.vocab_size
    model = model_config.build().to(device)
    initialize_weights(model, SEED)
    loss_function = CrossEntropyLoss.Config().build()
    optimizer = Optimizer.Config(lr=2e-3).build(model_parts=[model])
    schedule = LRScheduler.Config(warmup_steps=10, decay_ratio=0.5, decay_type="cosine", min_lr_factor=0.1)
    scheduler = schedule.build(optimizer=optimizer, training_steps=options.steps)

    progress = Progress()
    checkpoints = CheckpointManager.Config(enable=True, interval=50).build(
        dump_folder=options.folder,
        states={"model": ModelState([model]), "optimizer": optimizer, "lr_scheduler": scheduler, "progress": progress},
        rank_states={"dataloader": loader, "random": RandomState()},
    )
    metrics = MetricsProcessor.Config().build(
        dump_folder=options.folder,
        device=device,
        compute_dtype=torch.float32,
        flops_per_token=model.flops_per_token(SEQ_LEN),
        total_steps=options.steps,
    )
    profiler = Profiler.Config(enable_profiling=options.profile).build(dump_folder=options.folder, device=device)

    def summed_loss(batch):
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        head = partial(loss_function, labels_BL=batch["labels"])
        return model(batch["input"], batch.get("positions"), head=head)

    @torch.no_grad()
    def evaluate(n_batches=10):
        total, n_tokens = 0.0, 0
        for _, batch in zip(range(n_batches), load_data(data.for_validation(""), epochs=1), strict=False):
            total += summed_loss(batch).item()
            n_tokens += int((batch["labels"] != IGNORE_INDEX).sum())
        return total / n_tokens

    checkpoints.load()
    metrics.start(progress.step)
    with profiler:
        while progress.step < options.steps:
            with metrics.timing_data():
                batch = next(loader)
            optimizer.zero_grad()
            loss = summed_loss(batch) / (batch["labels"] != IGNORE_INDEX).sum()
            loss.backward()
            grad_norm = clip_grad_norm(model.parameters(), MAX_NORM)
            optimizer.step()
            progress.step += 1
            metrics.count_tokens(batch["input"].numel())
            if metrics.should_log(progress.step):
                n_tokens_seen = progress.step * BATCH_SIZE * SEQ_LEN
                metrics.log_step(
                    progress.step,
                    loss=loss.item(),
                    grad_norm=grad_norm.item(),
                    lr=scheduler.lr,
                    n_tokens_seen=n_tokens_seen,
                )
            scheduler.step()
            profiler.step(progress.step)
            last = progress.step == options.steps
            with metrics.exclude():
                if options.dataset == "stories" and (last or progress.step % 50 == 0):
                    metrics.log_validation(progress.step, evaluate())
                checkpoints.save(progress.step, last=last)
    metrics.close()
    checkpoints.close()


if __name__ == "__main__":
    main()
