"""Frozen encoders of FLUX in a folder of diffusers: CLIP's pooled text, T5's states, and latents of
an autoencoder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from torchtitan.tools.device import device_type
from torchtitan.tools.errors import UserError, in_words, summarize_names
from torchtitan.tools.files import read_object
from torchtitan.tools.logging import logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

TEXT = "text"
"""Name of T5's states in a batch."""
POOLED = "pooled"
"""Name of CLIP's pooled text."""
LATENTS = "pixels"
"""Name of what a model is trained on: latents, or pixels without an autoencoder."""

_TEXT_FOLDERS = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
_AUTOENCODER = "vae"
_CONFIG = "config.json"


@dataclass(frozen=True)
class EncoderFolder:
    """A pipeline's folder, such as a download of FLUX.1: CLIP in `text_encoder` and `tokenizer`, T5
    in `text_encoder_2` and `tokenizer_2`, and an autoencoder in `vae`. Without `vae`, a model is
    trained on pixels."""

    path: Path
    n_tokens: int
    """Tokens of a caption for T5, with padding; further ones are cut off, and counted."""
    dtype: torch.dtype
    """Type of the weights and of the results."""

    def check(self) -> None:
        """Raise `UserError` if the folder has no encoders."""
        missing = [name for name in _TEXT_FOLDERS if not (self.path / name).is_dir()]
        if missing:
            raise UserError(
                f"--dataloader.encoders {self.path} has no folder {missing[0]}; set it to a folder "
                "of diffusers with the text encoders of FLUX: text_encoder and tokenizer (CLIP), "
                "text_encoder_2 and tokenizer_2 (T5), and vae, or none to train on pixels"
            )

    @property
    def has_autoencoder(self) -> bool:
        return (self.path / _AUTOENCODER).is_dir()

    @property
    def reduction(self) -> int:
        """Pixels of an image's side for each of its latents."""
        if not self.has_autoencoder:
            return 1
        blocks: list[object] = self._value(_AUTOENCODER, "block_out_channels", list)
        return int(2 ** (len(blocks) - 1))

    @property
    def text_dim(self) -> int:
        """Width of T5's states."""
        return int(self._value("text_encoder_2", "d_model", int))

    @property
    def pooled_dim(self) -> int:
        """Width of CLIP's pooled text."""
        return int(self._value("text_encoder", "hidden_size", int))

    def _value(self, part: str, key: str, kind: type[T]) -> T:
        """Return a value of an encoder's config.json. Raise `UserError` if it is missing, or not of
        its kind."""
        file = self.path / part / _CONFIG
        if (value := read_object(file).get(key)) is None:
            raise UserError(f"--dataloader.encoders: {file} has no {key}; download the folder")
        if not isinstance(value, kind) or isinstance(value, bool) or not value:
            raise UserError(
                f"--dataloader.encoders: {file} has the {key} {value!r:.60}; download the folder"
            )
        return value

    def opened(self, part: str, kind: Any, **options: object) -> Any:
        """Return the model in a part of the folder, on this process's device. Raise `UserError` if
        its files cannot be read, or lack weights, which the class would draw at random."""
        model, found = self._from_pretrained(
            part, kind.from_pretrained, output_loading_info=True, **options
        )
        if missing := sorted(map(str, [*found["missing_keys"], *found["mismatched_keys"]])):
            raise UserError(
                f"--dataloader.encoders: {self.path / part} lacks weights of {kind.__name__}: "
                f"{summarize_names(missing)}; download the folder"
            )
        return model.to(device_type()).eval()

    def tokenizer(self, part: str) -> "PreTrainedTokenizerBase":
        """Return a tokenizer of the folder. Raise `UserError` if its files cannot be read, or need
        code."""
        from transformers import AutoTokenizer

        tokenizer: PreTrainedTokenizerBase = self._from_pretrained(
            part, AutoTokenizer.from_pretrained, trust_remote_code=False
        )
        return tokenizer

    def _from_pretrained(self, part: str, read: Callable[..., T], **options: object) -> T:
        try:
            return read(self.path / part, local_files_only=True, **options)
        except Exception as error:  # damaged files raise various types
            raise UserError(
                f"--dataloader.encoders: {self.path / part} cannot be opened: {in_words(error)}"
            ) from error

    def image_shape(self, pixels: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of what a model is trained on, for images of the shape `pixels`
        (channels, height, width)."""
        if not self.has_autoencoder:
            return tuple(pixels)
        sides = (side // self.reduction for side in pixels[1:])
        return (int(self._value(_AUTOENCODER, "latent_channels", int)), *sides)

    def shapes(self, pixels: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return the shape of each result for one image of the shape `pixels`."""
        texts = {TEXT: (self.n_tokens, self.text_dim), POOLED: (self.pooled_dim,)}
        latents = {LATENTS: self.image_shape(pixels)} if self.has_autoencoder else {}
        return {**texts, **latents}

    def identity(self, digest: Callable[[Path], str]) -> list[object]:
        """Return everything that determines the results: the content of files, and the settings."""
        folders = (*_TEXT_FOLDERS, *((_AUTOENCODER,) if self.has_autoencoder else ()))
        files = [path for name in folders for path in sorted((self.path / name).iterdir())]
        contents = [f"{p.parent.name}/{p.name} {digest(p)}" for p in files if p.is_file()]
        return [contents, self.n_tokens, str(self.dtype)]

    def open_autoencoder(self) -> Any:
        """Load the autoencoder on this process's device. Raise `UserError` without diffusers."""
        try:
            from diffusers import AutoencoderKL
        except ImportError as error:
            raise UserError(
                "latents need the package diffusers (pip install 'torchtitan[diffusion]', or "
                "EXTRA=diffusion ./run_train.sh)"
            ) from error
        return self.opened(_AUTOENCODER, AutoencoderKL, torch_dtype=self.dtype)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return the images of latents, (B, C, H, W), between -1 and 1; loads the autoencoder."""
        if not self.has_autoencoder:
            return latents
        model = self.open_autoencoder()
        x = latents / model.config.scaling_factor + (model.config.shift_factor or 0.0)
        images: Tensor = model.decode(x.to(self.dtype)).sample
        return images.float()


class Encoders:
    """The encoders of a folder, loaded on this process's device. Raise `UserError` without
    transformers."""

    def __init__(self, folder: EncoderFolder):
        try:
            from transformers import CLIPTextModel, T5EncoderModel
        except ImportError as error:
            raise UserError(
                "text encoders need the package transformers (pip install 'torchtitan[diffusion]', "
                "or EXTRA=diffusion ./run_train.sh)"
            ) from error
        self._folder = folder
        self._clip = folder.opened("text_encoder", CLIPTextModel, dtype=folder.dtype)
        self._t5 = folder.opened("text_encoder_2", T5EncoderModel, dtype=folder.dtype)
        self._clip_tokenizer, self._t5_tokenizer = (
            folder.tokenizer(name) for name in ("tokenizer", "tokenizer_2")
        )
        self._vae = folder.open_autoencoder() if folder.has_autoencoder else None
        self._n_cut = 0

    @torch.no_grad()
    def __call__(self, captions: Sequence[str], pixels: np.ndarray) -> dict[str, Tensor]:
        """Return FLUX's inputs for captions and images, as diffusers' pipelines compute them.

        Args:
            captions: B texts.
            pixels: uint8, (B, channels, height, width).

        Returns:
            `text` (B, n_tokens, text_dim) of T5, without a mask of padding; `pooled` (B,
            pooled_dim) of CLIP; and with an autoencoder the means of the latents, shifted and
            scaled, as `pixels`.
        """
        most = self._clip.config.max_position_embeddings
        clip_ids = self._ids(self._clip_tokenizer, captions, most)
        t5_ids = self._ids(self._t5_tokenizer, captions, self._folder.n_tokens)
        whole = self._t5_tokenizer(list(captions)).input_ids
        self._n_cut += sum(len(ids) > self._folder.n_tokens for ids in whole)
        states = {
            TEXT: self._t5(t5_ids).last_hidden_state,
            POOLED: self._clip(clip_ids).pooler_output,
        }
        if self._vae is not None:
            x = torch.from_numpy(np.array(pixels)).to(device_type())
            x = (x.float() / 127.5 - 1).to(self._folder.dtype)
            means = self._vae.encode(x).latent_dist.mode()
            settings = self._vae.config
            shifted = means - (settings.shift_factor or 0.0)
            states[LATENTS] = shifted * settings.scaling_factor
        return states

    def report(self) -> None:
        """Log how many captions were cut since the last call."""
        if self._n_cut:
            logger.warning(
                "%d captions have more than %d tokens for T5 and were cut; see "
                "--dataloader.caption_tokens",
                *(self._n_cut, self._folder.n_tokens),
            )
        self._n_cut = 0

    @staticmethod
    def _ids(tokenizer: "PreTrainedTokenizerBase", captions: Sequence[str], length: int) -> Tensor:
        encoded = tokenizer(
            list(captions),
            padding="max_length",
            max_length=length,
            truncation=True,
            return_tensors="pt",
        )
        ids: Tensor = encoded.input_ids
        return ids.to(device_type())
