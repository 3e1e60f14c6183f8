"""Train a small Llama 3 on the built-in stories with your own loop of torchtitan's parts.

    python THIS_FILE [--steps 100] [--folder outputs/plain_loop] [--dataset my.txt] [--profile]

After an interruption, run it again to continue from the last checkpoint. It runs in one process.
Edit anything.
"""

import argparse
from contextlib import closing

import torch

from torchtitan.components.checkpoint import CheckpointManager, ModelState, RandomState
from torchtitan.components.data.dataloader import PretrainDataLoader
from torchtitan.components.evaluation.validate import Validator
from torchtitan.components.losses.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.components.observe.metrics import MetricsProcessor
from torchtitan.components.observe.profiling import Profiler
from torchtitan.components.optim.lr_scheduler import LRScheduler
from torchtitan.components.optim.optimizer import Optimizer
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.distributed import initialize_weights
from torchtitan.distributed.gradients import clip_grad_norm
from torchtitan.models.llama3 import model_registry
from torchtitan.tools.cpu_products import onednn_products
from torchtitan.tools.device import device_type
from torchtitan.tools.logging import init_logger, logger

SEQ_LEN = 256
BATCH_SIZE = 8
MAX_NORM = 1.0
SEED = 0
STEP_TOKENS = BATCH_SIZE * SEQ_LEN


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--folder", default="outputs/plain_loop", help="where numbers, checkpoints and traces go"
    )
    parser.add_argument(
        "--dataset", default="stories", help="`stories`, or a file or folder of text"
    )
    parser.add_argument("--profile", action="store_true", help="write a trace of every tenth step")
    options = parser.parse_args()

    init_logger()
    torch.manual_seed(SEED)
    device = torch.device(device_type())

    # Data: batches of token ids, labels (the next tokens) and attention within the packed
    # documents.
    tokenizer = PretrainedTokenizer.Config().build(path="")
    sizes = {
        "tokenizer": tokenizer,
        "seq_len": SEQ_LEN,
        "local_batch_size": BATCH_SIZE,
        "seed": SEED,
    }
    data = PretrainDataLoader.Config(dataset=[options.dataset])
    loader = data.build(**sizes)

    # Model, loss, optimizer and schedule.
    model_config = model_registry("debugmodel").model
    model_config.vocab_size = tokenizer.vocab_size
    model = model_config.build().to(device)
    initialize_weights(model, SEED)
    cross_entropy = CrossEntropyLoss.Config().build()
    optimizer = Optimizer.Config(lr=2e-3).build(model_parts=[model])
    schedule = LRScheduler.Config(
        warmup_steps=10, decay_ratio=0.5, decay_type="cosine", min_lr_factor=0.1
    )
    scheduler = schedule.build(optimizer=optimizer, training_steps=options.steps)

    def summed_loss(batch):
        """Sum the loss over all tokens. The model's head is the loss, so that no tensor ever holds
        all logits."""
        batch = {name: value.to(device) for name, value in batch.items()}
        return model(
            batch["input"], batch.get("attention"), head=cross_entropy, labels_BL=batch["labels"]
        )

    def train_step(batch):
        """Update the weights; return the mean loss per token and the gradient norm before
        clipping."""
        optimizer.zero_grad()
        loss = summed_loss(batch) / (batch["labels"] != IGNORE_INDEX).sum()
        loss.backward()
        grad_norm = clip_grad_norm(model.parameters(), MAX_NORM)
        optimizer.step()
        return loss.item(), grad_norm.item()

    # Metrics, validation and checkpoints.
    validator = None
    if validation_data := data.for_validation(""):  # None for a dataset without a validation split
        validator = Validator.Config(freq=50, steps=10).build(
            model_parts=[model],
            dataloaders={"": validation_data.build(**sizes, epochs=1)},
            tokenizer=tokenizer,
            batches_per_step=1,
            sums_of_batch=lambda batch: (
                summed_loss(batch),
                int((batch["labels"] != IGNORE_INDEX).sum()),
            ),
            loss=cross_entropy,
        )
    checkpoints = CheckpointManager.Config(enable=True, interval=50).build(
        dump_folder=options.folder,
        states={"model": ModelState([model]), "optimizer": optimizer, "lr_scheduler": scheduler},
        rank_states={"dataloader": loader, "random": RandomState()},
    )
    metrics = MetricsProcessor.Config().build(
        dump_folder=options.folder,
        device=device,
        compute_dtype=torch.float32,
        flops_per_token=model.flops_per_token(SEQ_LEN),
        total_steps=options.steps,
    )
    profiler = Profiler.Config(enable_profiling=options.profile).build(
        dump_folder=options.folder, device=device
    )

    with onednn_products(), closing(loader), closing(checkpoints), closing(metrics), profiler:
        last_step = checkpoints.load()  # 0 if there is nothing to resume
        if last_step >= options.steps:
            logger.info(
                "%s holds all %d steps already; --steps says how far to go",
                options.folder,
                last_step,
            )
        metrics.start(last_step)
        for step in range(last_step + 1, options.steps + 1):
            with metrics.timing_data():
                batch = next(loader)
            loss, grad_norm = train_step(batch)
            metrics.count_tokens(STEP_TOKENS)
            metrics.log_step(
                step,
                loss=loss,
                grad_norm=grad_norm,
                lr=scheduler.lr,
                n_tokens_seen=step * STEP_TOKENS,
            )
            scheduler.step()
            profiler.step(step)
            last = step == options.steps
            with metrics.exclude():  # not training time
                if validator and validator.is_due(step, last=last):
                    metrics.log_validation(step, **validator.validate())
                checkpoints.save(step, last=last)


if __name__ == "__main__":
    main()
