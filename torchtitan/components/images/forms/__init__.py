"""Forms of images in texts. A new one is a class in a file of its own, and an entry here."""

from torchtitan.components.images.forms.caption import CaptionForm
from torchtitan.components.images.forms.decoder import (
    DecoderForm,
    PatchesForm,
    PromptedDecoderForm,
    T5Gemma2Form,
)
from torchtitan.components.images.forms.form import ImageForm
from torchtitan.components.images.forms.leading import LeadingForm
from torchtitan.components.images.forms.plain import (
    JoinedForm,
    PlainForm,
    RewritingForm,
    WrittenForm,
)
from torchtitan.components.images.forms.prefix import PrefixForm
from torchtitan.components.images.forms.prompted import PromptedForm
from torchtitan.components.images.forms.rows import RowsForm

FORMS: tuple[type[ImageForm], ...] = (
    LeadingForm,
    CaptionForm,
    PromptedForm,
    DecoderForm,
    PatchesForm,
    PromptedDecoderForm,
    T5Gemma2Form,
    RowsForm,
    WrittenForm,
    JoinedForm,
    PrefixForm,
    RewritingForm,
    PlainForm,
)
"""In the order in which they are tried. The last one takes what is left, or says why not."""
