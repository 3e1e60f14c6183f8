"""What the trainer asks of a model: a configurable module that knows its size and its cost."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchtitan.config import Configurable
from torchtitan.protocols.converted_module import ConvertedModule
from torchtitan.tools.errors import UserError


class BaseModel(nn.Module, Configurable):
    """A model that the trainer can train.

    `config.build()` constructs it; under `torch.device("meta")` that allocates nothing. Every module that owns
    parameters carries their initial distributions (`torchtitan.protocols.initializer`), so that weights can be
    filled in later, whatever has been sharded or wrapped in between.

    The forward pass is `forward(tokens, positions=None, *, head=…, **head_inputs)`, see
    `torchtitan.models.common.decoder.Decoder`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Fields that the trainer reads whatever the family."""

        dim: int
        """Width of the residual stream, the hidden states between layers."""

        vocab_size: int | None = None
        """Rows of the embedding and of the output head. None: as many as the tokenizer has."""

        max_seq_len: int = 8192
        """Tokens that the published model was trained to attend over; a longer training.seq_len only warns."""

        @property
        def tensor_parallel_sizes(self) -> dict[str, int]:
            """The sizes that tensor parallelism splits, by field; its degree must divide each of them."""
            return {}

        def pipeline_modules(self) -> list[list[str]]:
            """Names of the model's parts in the order of the forward pass; a pipeline is cut between the inner lists.

            Raises:
                UserError: if a model with this configuration cannot be cut.
            """
            raise UserError(f"{type(self).__qualname__} does not say where a pipeline can cut it")

        def validate(self) -> None:
            """Raise `UserError` for a combination of sizes that cannot be built."""

    def __init__(self, config: "BaseModel.Config"):
        nn.Module.__init__(self)
        Configurable.__init__(self, config)

    def num_parameters(self) -> int:
        """Parameters of the model, each counted once, however often it is used."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations of forward and backward for one token of a sample of `seq_len` tokens.

        Converters may have been applied to the model, and parameters frozen: see `count_elements`.
        """
        raise NotImplementedError


def count_elements(module: nn.Module) -> Iterator[tuple[int, bool]]:
    """What the modules in `module` compute with, in the order in which they are registered: the elements of each
    parameter, and whether it is trained. A `ConvertedModule` has the plain module's parameters, whatever form it keeps
    them in, and others that are trained."""
    for part in module.modules():
        own = dict(part.named_parameters(recurse=False))
        trained = {name: parameter for name, parameter in own.items() if parameter.requires_grad}
        plain: Mapping[str, Tensor] = own
        if isinstance(part, ConvertedModule):
            plain = part.plain_state({name: torch.empty_like(tensor, device="meta") for name, tensor in own.items()})
        yield from ((tensor.numel(), False) for name, tensor in plain.items() if name not in trained)
        yield from ((parameter.numel(), True) for parameter in trained.values())
