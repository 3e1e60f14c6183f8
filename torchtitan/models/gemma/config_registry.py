"""Training configurations of Gemma: `--module gemma --config debugmodel`."""

from torchtitan.models.common.recipes import published, small
from torchtitan.models.gemma import FAMILY

gemma_debugmodel = small(FAMILY, "debugmodel")
gemma2_debugmodel = small(FAMILY, "2-debugmodel")
gemma2_2b = published(FAMILY, "2-2B", "gemma-2-2b", lr=4e-4, local_batch_size=4)
gemma2_9b = published(FAMILY, "2-9B", "gemma-2-9b", lr=3e-4, local_batch_size=2)
gemma3_270m = published(FAMILY, "3-270M", "gemma-3-270m", lr=4e-4, local_batch_size=4)
gemma3_1b = published(FAMILY, "3-1B", "gemma-3-1b-pt", lr=4e-4, local_batch_size=4)
gemma3_4b = published(FAMILY, "3-4B", "gemma-3-4b-pt", lr=4e-4, local_batch_size=2)
gemma3_12b = published(FAMILY, "3-12B", "gemma-3-12b-pt", lr=3e-4, local_batch_size=2)
gemma3_27b = published(FAMILY, "3-27B", "gemma-3-27b-pt", lr=1.5e-4, local_batch_size=1)
