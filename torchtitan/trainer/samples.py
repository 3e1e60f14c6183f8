"""Texts that the model writes during training."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from torchtitan.components.chat_template import ChatTemplate, load_chat_template
from torchtitan.components.generation import (
    Generation,
    Sampling,
    TextStream,
    continuation_stop_ids,
    generate,
    stop_ids,
)
from torchtitan.components.observe.run_files import TEXT_SAMPLES
from torchtitan.components.rollout.chat import Chat
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.config.sections import require_at_least
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger, presentable
from torchtitan.trainer.callbacks import LineRecorder, PeriodicEvaluation, refuse_scores
from torchtitan.trainer.evaluation import share_of
from torchtitan.trainer.run import Run, Sections

_SHOWN = 200
"""Characters of a sample in the log."""


class _Prompt(NamedTuple):
    text: str
    ids: list[int]
    read: Callable[[list[int]], str]
    """Decodes the new tokens."""


class Samples(PeriodicEvaluation, LineRecorder):
    """Continue prompts and answer messages every `freq` steps and after the last one. Append each
    text to `samples.jsonl` (`step`, `prompt`, `completion`), and log its beginning. Data-parallel
    ranks divide the prompts."""

    file_name = TEXT_SAMPLES

    @dataclass(kw_only=True, slots=True)
    class Config(PeriodicEvaluation.Config):
        """Texts written during training."""

        prompts: list[str] = field(default_factory=list)
        """Texts to continue."""

        messages: list[str] = field(default_factory=list)
        """Messages of a user to answer, in the chat template of the data, else of the model."""

        freq: int = 500
        """Training steps between samples."""

        max_new_tokens: int = 64
        """Tokens of each text, at most."""

        temperature: float = 0.0
        """Temperature of sampling; 0: always the most probable token."""

        batch_size: int = 8
        """Texts that a rank writes at a time."""

        def validate(self) -> None:
            options = {
                f"callbacks__samples__{name}": getattr(self, name)
                for name in ("freq", "max_new_tokens", "batch_size")
            }
            require_at_least(1, **options)
            require_at_least(0, callbacks__samples__temperature=self.temperature)

        def is_on(self, run: Run) -> bool:
            return bool(self.prompts or self.messages)

        def check_run(self, run: Sections) -> None:
            if not (self.prompts or self.messages):
                return
            run.parallelism.require_one(
                "context", "pipeline", user="--callbacks.samples (see torchtitan generate)"
            )
            refuse_scores(run, "--callbacks.samples")
            length = run.training.seq_len
            if self.max_new_tokens >= length:
                raise UserError(
                    f"--callbacks.samples.max_new_tokens {self.max_new_tokens} leaves no room for "
                    f"a prompt in --training.seq_len {length}"
                )

    config: Config

    def __init__(self, config: Config, *, trainer: Run):
        super().__init__(config, trainer=trainer)
        tokenizer = trainer.tokenizer
        folders = [tokenizer.folder] if tokenizer.folder else []
        self._prompts: list[_Prompt] = []
        self._stop_ids: set[int] = set()
        if config.prompts:
            self._stop_ids |= continuation_stop_ids(tokenizer, folders)
            self._prompts += [_continued(tokenizer, text) for text in config.prompts]
        if config.messages:
            chat = Chat(template_of(trainer, "--callbacks.samples.messages"), tokenizer)
            self._stop_ids |= stop_ids(tokenizer, *folders) | {*chat.stops.ids()}
            self._prompts += [_answered(chat, text) for text in config.messages]
        self._check_lengths()

    def _check_lengths(self) -> None:
        room = self.trainer.config.training.seq_len - self.config.max_new_tokens
        for prompt in self._prompts:
            if len(prompt.ids) > room:
                raise UserError(
                    f"--callbacks.samples: the prompt {prompt.text!r} has {len(prompt.ids)} "
                    f"tokens, and --training.seq_len leaves {room} besides max_new_tokens "
                    f"{self.config.max_new_tokens}"
                )

    @property
    def period(self) -> int:
        return self.config.freq

    def evaluate(self) -> None:
        """Write the texts."""
        trainer = self.trainer
        with trainer.evaluated_weights(), trainer.mixed_precision():
            texts = self._texts()
        for prompt, text in zip(self._prompts, texts, strict=True):
            self.write([{"step": trainer.step, "prompt": prompt.text, "completion": text}])
            if trainer.rank == 0:
                shown = presentable(f"{prompt.text} → {text}".replace("\n", " "))
                logger.info("step %d: sample: %s", trainer.step, shown[:_SHOWN])

    def _texts(self) -> list[str]:
        """Return the texts of all prompts, on every rank."""
        (model,) = self.trainer.model_parts
        share, size = share_of(self.trainer), self.config.batch_size
        n_batches = -(-len(self._prompts) // size)
        found: dict[int, list[str]] = {}
        for number in share.rounds(n_batches):
            batch = self._prompts[number * size : (number + 1) * size]
            sampling = Sampling(temperature=self.config.temperature, seed=number)
            written: list[Generation] = generate(
                model,
                [prompt.ids for prompt in batch],
                max_new_tokens=self.config.max_new_tokens,
                sampling=sampling,
                stop_ids=self._stop_ids,
                group=share.group,
            )
            found[number] = [
                prompt.read(one.ids) for prompt, one in zip(batch, written, strict=True)
            ]
        return [text for texts in share.gather(found) for text in texts]


def template_of(trainer: Run, user: str) -> ChatTemplate:
    """Return the chat template of a run's data, else of its model. Raise `UserError`, which names
    the option `user`, without one."""
    tokenizer = trainer.tokenizer
    folders = [tokenizer.folder] if tokenizer.folder else []
    template: ChatTemplate | None = getattr(trainer.dataloader, "template", None)
    if template := template or load_chat_template(*folders):
        return template
    raise UserError(
        f"{user} needs a chat template, and neither the data nor {tokenizer.folder or 'the model'} "
        "has one; add chat_template.jinja to the folder of --hf_assets_path"
    )


def _continued(tokenizer: Tokenizer, text: str) -> _Prompt:
    ids = tokenizer.encode(text, add_eos=False)
    if not ids:
        raise UserError("--callbacks.samples.prompts: a prompt is empty, and gets no BOS")

    def read(new: list[int]) -> str:
        stream = TextStream(tokenizer, ids)
        for token in new:
            stream.push(token)
        stream.finish()
        return stream.text

    return _Prompt(text, ids, read)


def _answered(chat: Chat, text: str) -> _Prompt:
    ids = chat.encode([{"role": "user", "content": text}])
    return _Prompt(text, ids, lambda new: chat.read(ids, new).content)
