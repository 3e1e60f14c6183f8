"""Training data: documents, their token cache, packing, and the data loaders."""

from torchtitan.components.data.dataloader import BaseDataLoader, PretrainDataLoader
from torchtitan.components.data.hub import HubDataset, register_dataset
from torchtitan.components.data.packing import Batch
from torchtitan.components.loss import IGNORE_INDEX

__all__ = ["IGNORE_INDEX", "BaseDataLoader", "Batch", "HubDataset", "PretrainDataLoader", "register_dataset"]
