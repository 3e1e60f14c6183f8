"""Opens the processor of a model's folder without its parts for videos and sounds.

Source: transformers 5.23.0, processing_utils.py (`ProcessorMixin`) and models/auto.
"""

import importlib
import importlib.util
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from torchtitan.components.images.opened import ClassProcessor
from torchtitan.components.images.placing import CHANGES
from torchtitan.tools.errors import UserError, in_words
from torchtitan.tools.files import read_object

if TYPE_CHECKING:
    from transformers.processing_utils import ProcessorMixin

BackEnd = Literal["auto", "pillow", "torchvision"]

_BACK_ENDS = {"pillow": "pil", "torchvision": "torchvision"}
"""Back end → its name in transformers."""

CONFIGS = ("processor_config.json", "preprocessor_config.json")
OPTIONAL_CONFIGS = ("video_preprocessor_config.json",)
"""Files that describe a processor. Either of the first ones is needed; newer versions of
transformers write both processors into processor_config.json."""

_OF_TYPES = {"vision-encoder-decoder": "TrOCRProcessor"}
"""Type of models that transformers has no processor for → the class of any image processor and
tokenizer."""

_UNFIT = {
    "ShieldGemma2Processor": "asks questions of its own about each image, whatever the text is"
}
"""Class of a processor → why conversations cannot be trained with it."""


def check_packages() -> None:
    """Raise `UserError` without the packages that read images."""
    needed = {"transformers": "transformers", "Pillow": "PIL"}
    missing = [name for name, module in needed.items() if not importlib.util.find_spec(module)]
    if missing:
        raise UserError(
            f"training on images needs {' and '.join(missing)}: pip install "
            "'torchtitan[vision]', or EXTRA=vision ./run_train.sh"
        )


def preferred_back_end(back_end: BackEnd) -> str:
    """Return the chosen back end, by default the one for a class with both. Raise `UserError` if
    torchvision is chosen and absent, or installed and broken."""
    has_torchvision = _has_torchvision()
    if back_end == "torchvision" and not has_torchvision:
        raise UserError(
            "--dataloader.image_back_end torchvision: torchvision is not installed; install the "
            f"version that belongs to torch {torch.__version__}, or choose pillow"
        )
    if back_end == "auto":
        return "torchvision" if has_torchvision else "pillow"
    return back_end


def _has_torchvision() -> bool:
    try:
        importlib.import_module("torchvision")
    except (ImportError, OSError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torchvision":
            return False
        raise UserError(
            f"torchvision is installed and cannot be imported: {in_words(error)}; transformers "
            "imports it for images, also for Pillow: install the version that belongs to torch "
            f"{torch.__version__}, or uninstall it"
        ) from error
    return True


def back_end_of(image_processor: object) -> str:
    """Return the back end that computes an image processor's pixels, pillow or torchvision."""
    bases = [base.__name__ for base in type(image_processor).__mro__]
    return "torchvision" if "TorchvisionBackend" in bases else "pillow"


def _processor_class(folder: Path) -> "type[ProcessorMixin]":
    """Return the class that the folder's files name, or else the class of its model_type."""
    from transformers.models.auto import processing_auto
    from transformers.processing_utils import ProcessorMixin

    documents = [read_object(folder / name) for name in (*CONFIGS, "tokenizer_config.json")]
    names = [document["processor_class"] for document in documents if "processor_class" in document]
    model_type = str(read_object(folder / "config.json").get("model_type"))
    known = {**_OF_TYPES, **processing_auto.PROCESSOR_MAPPING_NAMES}
    if not names and model_type in known:
        names = [known[model_type]]
    if not names:
        raise UserError(
            f"'{folder}' names no processor_class, and transformers has none for its model_type "
            f"'{model_type}'"
        )
    cls = processing_auto.processor_class_from_name(names[0])
    if getattr(cls, "is_dummy", False):
        return pixtral_class() if names[0] == "PixtralProcessor" else cls
    if not isinstance(cls, type) or not issubclass(cls, ProcessorMixin):
        raise UserError(
            f"'{folder}' names the processor_class {names[0]!r}, which transformers does not have"
        )
    parts = cls.get_attributes()
    if "image_processor" not in parts:
        raise UserError(f"{cls.__name__} reads no images; its parts are {', '.join(parts)}")
    if names[0] in _UNFIT:
        raise UserError(f"'{folder}': {names[0]} {_UNFIT[names[0]]}; train a model of another type")
    return cls


def pixtral_class() -> "type[ProcessorMixin]":
    """Return Mistral 3's class, which transformers does not offer without torchvision: its module
    imports a function from the module of the torchvision back end; the module of Pillow's has it
    as well."""
    replaced = "transformers.models.pixtral.image_processing_pixtral"
    sys.modules[replaced] = importlib.import_module(
        "transformers.models.pixtral.image_processing_pil_pixtral"
    )
    try:
        module = importlib.import_module("transformers.models.pixtral.processing_pixtral")
        found: type[ProcessorMixin] = module.PixtralProcessor
        return found
    finally:
        del sys.modules[replaced]


def open_processor(folder: Path, back_end: BackEnd) -> ClassProcessor:
    """Build the processor of a folder from its image processor and tokenizer. `AutoProcessor` also
    wants processors of videos and sounds, which need other packages."""
    preferred = preferred_back_end(back_end)
    from transformers import AutoImageProcessor, AutoTokenizer

    cls = _processor_class(folder)
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    # transformers takes Pillow for a class with a filter that an older torchvision lacks
    is_free = back_end == "auto" and preferred == "torchvision"
    backend = None if is_free else _BACK_ENDS[preferred]
    try:
        parts = {
            "image_processor": AutoImageProcessor.from_pretrained(
                folder, backend=backend, **options
            ),
            "tokenizer": AutoTokenizer.from_pretrained(folder, **options),
        }
        parts |= {
            name: AutoTokenizer.from_pretrained(folder / name, **options)
            for name in cls.get_attributes()
            if name.endswith("_tokenizer")
        }
        _skip_package_of_videos(cls)
        changes = [CHANGES[cls.__name__]] if cls.__name__ in CHANGES else []
        images_only: type[ProcessorMixin] = type(cls.__name__, (_ImagesOnly, *changes, cls), {})
        arguments = [parts.get(name, _ABSENT.get(name)) for name in cls.get_attributes()]
        processor: ClassProcessor = images_only.from_args_and_dict(
            arguments, read_object(folder / "processor_config.json")
        )
        return processor
    except Exception as error:  # classes raise various types
        if "torchvision" in str(error) and not _has_torchvision():
            raise UserError(
                f"'{folder}': {cls.__name__} processes images with torchvision only, which is not "
                f"installed; install the version that belongs to torch {torch.__version__}"
            ) from error
        raise UserError(
            f"'{folder}': {cls.__name__} cannot be built here: {in_words(error)}"
        ) from error


class _NoVideos(dict[str, None]):
    """The place of a processor of videos: each of its settings, which some classes read when they
    are built, is None. A dictionary, since classes write their parts as JSON."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)
        return None


_ABSENT = {"video_processor": _NoVideos()}
_latest = threading.local()


class _ImagesOnly:
    """Makes a processor's parts optional, and keeps what it writes for images."""

    @property
    def replacements(self) -> Sequence[str]:
        """The text in the place of each image of the latest call in this thread: rollouts read
        sizes in another one than batches."""
        return getattr(_latest, "replacements", ())

    @replacements.setter
    def replacements(self, texts: Sequence[str]) -> None:
        _latest.replacements = texts

    def get_text_with_replacements(self, *args: object, **kwargs: object) -> tuple[object, ...]:
        result = super().get_text_with_replacements(*args, **kwargs)  # type: ignore[misc]
        self.replacements = [one["replacement"] for sample in result[1] for one in sample]
        return result

    def check_argument_for_proper_class(self, argument_name: str, argument: object) -> object:
        if argument is None or isinstance(argument, _NoVideos):
            return None
        return super().check_argument_for_proper_class(  # type: ignore[misc]
            argument_name, argument
        )


def _skip_package_of_videos(cls: "type[ProcessorMixin]") -> None:
    """SmolVLM's class refuses to be built without num2words, which it uses for videos only."""
    names = cls.__init__.__globals__
    if names.get("num2words", ...) is None:
        names["num2words"] = _no_videos


def _no_videos(number: int) -> str:
    raise UserError("videos need the package num2words: pip install num2words")
