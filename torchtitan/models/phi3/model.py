"""Phi-3 (arXiv:2404.14219), Phi-3.5, Phi-4 (arXiv:2412.08905) and Phi-4-mini (arXiv:2503.01743),
and their Hugging Face format."""

from torchtitan.models.common import gguf, gguf_rows
from torchtitan.models.common import hugging_face as hf
from torchtitan.models.common.layer_types import WindowedDecoder
from torchtitan.tools.errors import UnsupportedModelError


class Phi3Model(WindowedDecoder):
    """Llama's decoder with a sliding window in all layers of some models, and LongRoPE in models of
    long context."""


_SCALINGS = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
"""Type of RoPE → what transformers computes: in early files of Phi-3, `yarn` names LongRoPE too."""


def _prepare(document: dict[str, object]) -> dict[str, object]:
    """Return a config.json with the current names of RoPE's types. Raise `UserError` for types of
    other families."""
    for section in ("rope_scaling", "rope_parameters"):
        values = document.get(section)
        if not (isinstance(values, dict) and values):
            continue
        said = values.get("rope_type", values.get("type", "default"))
        if said not in list(_SCALINGS):
            raise UnsupportedModelError(
                f"config.json: RoPE of type {said!r}, which this family does not support (only "
                "'longrope')"
            )
        document[section] = {**values, "rope_type": _SCALINGS[said]}
    return document


def _extra_keys(config: Phi3Model.Config) -> dict[str, object]:
    """Return LongRoPE as in the published files, with the only three keys that transformers 4
    accepts, if they can say it."""
    rope = config.rope
    ratio = config.max_seq_len / rope.original_max_seq_len
    if (
        rope.scaling != "longrope"
        or rope.attention_factor is not None
        or rope.scaling_factor != ratio
    ):
        return {}
    factors = {"short_factor": rope.short_factors, "long_factor": rope.long_factors}
    return {"rope_scaling": {"type": "longrope", **factors}}


FORMAT = hf.dense_format(
    {
        "phi3": hf.ModelType(
            architecture="Phi3ForCausalLM",
            config=Phi3Model.Config,
            rows=hf.replaced(hf.DENSE_ROWS, *hf.FUSED_QKV, hf.FUSED_GATE_UP),
            keys={"sliding_window": "sliding_window"},
            defaults={
                "rms_norm_eps": 1e-5,
                "original_max_position_embeddings": 4096,
                "partial_rotary_factor": 1.0,
            },
            prepare=_prepare,
            # in Phi-4-mini; not read by transformers
            ignored=("full_attn_mod", "interpolate_factor", "lm_head_bias"),
            write=hf.write_if(
                lambda c: c.rope.scaling == "longrope" or not c.rope.is_scaled, _extra_keys
            ),
        )
    }
)

GGUF = gguf.gguf_format(
    gguf.Architecture(
        name="phi3",
        config=Phi3Model.Config,
        rows=lambda config: (gguf_rows.FUSED_QKV, gguf_rows.FUSED_GATE_UP),
        biased="",
        any_head_width=False,
        rotation=gguf.Rotation(part=True, scalings=("longrope",)),
    )
)
