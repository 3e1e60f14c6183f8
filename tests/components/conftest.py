"""Fixtures for a small real model."""

from pathlib import Path

import pytest
from torch import nn

from torchtitan.components.tokenizer import PretrainedTokenizer, Tokenizer
from torchtitan.models.pretrained import load_model


@pytest.fixture(scope="module")
def stories_model(stories: Path) -> nn.Module:
    return load_model(stories, device="cpu").model


@pytest.fixture(scope="module")
def stories_tokenizer(stories: Path) -> Tokenizer:
    return PretrainedTokenizer.Config().build(path=stories)
