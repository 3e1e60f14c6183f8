"""A folder of diffusers with tiny random encoders of FLUX."""

from pathlib import Path
from typing import Any

import torch

WORDS = "a heron stork in the reeds red blue small large dog cat".split()
CLIP_TOKENS, T5_TOKENS = 10, 7


def save_encoders(folder: Path, *, autoencoder: bool = True) -> dict[str, Any]:
    """Write the folder; return the arguments of a pipeline of diffusers with the same parts."""
    from diffusers import AutoencoderKL
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    torch.manual_seed(0)
    vocabulary = len(WORDS) + 3
    clip = CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CLIP_TOKENS,
        eos_token_id=1,
    )
    t5 = T5Config(vocab_size=vocabulary, d_model=12, d_kv=6, d_ff=20, num_layers=2, num_heads=2)
    parts: dict[str, Any] = {
        "text_encoder": CLIPTextModel(clip).eval(),
        "text_encoder_2": T5EncoderModel(t5).eval(),
        "tokenizer": _tokenizer(CLIP_TOKENS),
        "tokenizer_2": _tokenizer(100),
    }
    if autoencoder:
        parts["vae"] = AutoencoderKL(
            block_out_channels=(8, 8),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=2,
            norm_num_groups=4,
            scaling_factor=0.3,
            shift_factor=0.1,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ).eval()
    for name, part in parts.items():
        part.save_pretrained(folder / name)
    return parts


def _tokenizer(length: int) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=length,
    )
