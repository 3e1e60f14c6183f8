"""`ModelConverter`: a rewrite of a model's modules that composes with everything else."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from torchtitan.config import CompileConfig, Configurable, ParallelismConfig, TrainingConfig
from torchtitan.protocols.model_spec import ModelSpec


class ModelConverter(Configurable):
    """Rewrites modules in place. Listed in `Trainer.Config.model_converters`, applied in that order.

    Each hook does nothing unless a subclass overrides it. They are called in this order: `convert`, then, where the run
    begins, `load_initial_weights`, then `post_init_hook`, then, for every step, `pre_step_hook` and
    `post_optimizer_hook`.
    """

    changes_weights: ClassVar[bool] = False
    """Whether the converted model's tensors are not those of the plain one (`ConvertedModule`): checkpoints then say
    which converters there were, so that the plain model can be made of them."""

    simulates: ClassVar[bool] = False
    """Whether the run computes as its model will once `torchtitan convert` has quantized it: checkpoints say how."""

    run_options: ClassVar[frozenset[str]] = frozenset()
    """Fields of its Config that a run may change and go on with the same weights: those that say how these are trained,
    what they begin as, or what their names and shapes show. All others say what the weights mean."""

    freezes: ClassVar[bool] = False
    """Whether weights that it leaves untrained never change. Those of linear layers are then kept in the type that they
    are computed in, where those that are trained have a more precise one."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """A converter's options: `--model_converters.<class name in lower case>.<field>`."""

        def check_run(
            self, *, training: TrainingConfig, parallelism: ParallelismConfig, compile: CompileConfig
        ) -> None:
            """Find what this converter does not go with, before any process starts.

            Raises:
                UserError: naming both.
            """

        def check_device(self) -> None:
            """Find what this machine's device cannot compute, before any process starts; a dry run, which computes
            nothing, does without.

            Raises:
                UserError: saying what it would take.
            """

    def check_model(self, model: nn.Module) -> None:
        """Called before any process starts, with a model on the meta device that is thrown away afterwards, and that
        the converters before this one have seen in the same way: the place to find a user's mistakes.

        Raises:
            UserError: where `convert` would not find what it is to convert.
        """

    def check_initial_weights(self, spec: ModelSpec, given: Configurable.Config | None) -> None:
        """Called before any process starts, where the run begins: the place to find what `load_initial_weights` cannot
        load.

        Args:
            spec: the plain model.
            given: of a converter that changes weights, its configuration in the run that saved the checkpoint that this
                run begins with as it is; `load_initial_weights` is not called then. None: there is none.

        Raises:
            UserError: naming what cannot be loaded.
        """

    def convert(self, model: nn.Module) -> None:
        """Called once after construction on the meta device, before any parallelisation.

        Raises:
            UserError: where the model has nothing that could be converted as the configuration says.
        """

    def load_initial_weights(self, model_parts: list[nn.Module], spec: ModelSpec) -> None:
        """Called where the run begins, when the plain model's weights have been initialised or loaded: what else begins
        with values from a file is loaded here. Where a run resumes, it is called only if the checkpoint lacks frozen
        weights (`checkpoint.trained_only`), which may have begun so too."""

    def post_init_hook(self, model_parts: list[nn.Module]) -> None:
        """Called once before training, when weights have been initialised, and loaded where there was a checkpoint."""

    def pre_step_hook(self, model_parts: list[nn.Module], step: int) -> None:
        """Called before each training step with its number, from 1; a resumed run goes on counting.

        Where a step finds no data left, it was none: this is called once more then, with the number of the last one
        that took place (0: none did), so that a last validation computes as that step did.
        """

    def post_optimizer_hook(self, model_parts: list[nn.Module]) -> None:
        """Called after each optimizer step."""

    def write_beside_export(
        self, folder: Path, spec: ModelSpec, model: nn.Module, read: Callable[[str], Tensor]
    ) -> None:
        """Called in one process when a run, or `torchtitan convert`, has written the plain model's weights to `folder`
        as Hugging Face files: what of the conversion is of use by itself goes into a folder inside.

        Args:
            folder: the Hugging Face folder.
            spec: the plain model.
            model: the converted one, on the meta device; which of its parameters were trained, as far as that is known.
            read: name of a tensor of the converted model → that tensor, whole.
        """
