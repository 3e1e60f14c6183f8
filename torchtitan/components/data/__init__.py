"""Training data, from files to batches.

| module or package | contents |
|---|---|
| `base` | batches, and the interface of all loaders |
| `dataloader` | the loader for pre-training: start here |
| `pretraining` | documents as tokens on disk, windows of running text and their order, streams |
| `finetuning` | rows as samples on disk, windows of samples; start at `rows_loader` |
| `plan` | which samples share a window, from their lengths alone; samplers |
| `sources` | where data is, and its documents or rows: files, tables, stores, the hub |
| `prepare` | `torchtitan data prepare`: caches of any size, by many processes |
| `workers`, `forks` | processes that prepare batches, and that encode rows |
| `disk_cache`, `sequence_cache` | folders built once per host; results of a frozen model |
| `report` | counts of rows and tokens, and of dropped rows by reason |

A sample of pre-training: `sources.rows.Part.documents` → `pretraining.token_cache` →
`pretraining.windows.PackedDataset` → `to_batch`. A row of fine-tuning: `sources.rows.Part.rows` →
`finetuning.row_formats` → `finetuning.row_batches` → `finetuning.sample_cache` → `plan.Planner` →
`finetuning.samples.WindowDataset` → the loader's `collate`.
"""

from typing import TYPE_CHECKING

from torchtitan.components.data.sources.source import (
    ChatDataset,
    HubDataset,
    register_chat_dataset,
    register_dataset,
)
from torchtitan.tools.deferred import deferred

if TYPE_CHECKING:
    from torchtitan.components.data.base import BaseDataLoader, Batch
    from torchtitan.components.data.dataloader import PretrainDataLoader
    from torchtitan.components.data.finetuning.preference import PreferenceDataLoader
    from torchtitan.components.data.finetuning.prompts import PromptDataLoader
    from torchtitan.components.data.finetuning.sft import SFTDataLoader
    from torchtitan.components.losses.labels import IGNORE_INDEX

__getattr__ = deferred(
    __name__,
    {
        "IGNORE_INDEX": ".losses.labels",
        "BaseDataLoader": "base",
        "Batch": "base",
        "PreferenceDataLoader": "finetuning.preference",
        "PretrainDataLoader": "dataloader",
        "PromptDataLoader": "finetuning.prompts",
        "SFTDataLoader": "finetuning.sft",
    },
)

__all__ = [
    "IGNORE_INDEX",
    "BaseDataLoader",
    "Batch",
    "ChatDataset",
    "HubDataset",
    "PreferenceDataLoader",
    "PretrainDataLoader",
    "PromptDataLoader",
    "SFTDataLoader",
    "register_chat_dataset",
    "register_dataset",
]
