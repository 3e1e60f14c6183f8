"""SmolLM3 (huggingface.co/blog/smollm3), and its Hugging Face format."""

from dataclasses import dataclass, field

from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.gguf import NEIGHBORS, Architecture, gguf_format, require_gguf
from torchtitan.models.common.hugging_face import DENSE_ROWS, ModelType, dense_format
from torchtitan.models.common.layer_types import WINDOW_KEYS, WindowedDecoder, prepare_windows
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.tools.errors import UserError


class SmolLM3Model(WindowedDecoder):
    """Llama's decoder without positions in every fourth layer (Yang et al. 2025,
    arXiv:2501.18795)."""

    @dataclass(kw_only=True, slots=True)
    class Config(WindowedDecoder.Config):
        no_rope_layers: list[int] = field(default_factory=lambda: [1, 1, 1, 0])
        """1 for a layer with rotary positions, 0 for a layer without, for the first layers;
        repeated for the others."""

        def validate(self) -> None:
            WindowedDecoder.Config.validate(self)
            if not (self.no_rope_layers and set(self.no_rope_layers) <= {0, 1}):
                raise UserError(
                    f"--model.no_rope_layers is {self.no_rope_layers}, but must be a list of 1 and "
                    "0"
                )

    config: Config

    def rope_of_layer(self, index: int) -> RoPEConfig | None:
        has_rope = self.config.no_rope_layers
        return self.config.rope if has_rope[index % len(has_rope)] else None


def _prepare(document: dict[str, object]) -> dict[str, object]:
    """Return a config.json with a list instead of `no_rope_layer_interval`, and with windows in
    layers without positions, if it has windows. Raise `UserError` for contradictory keys."""
    reader = ConfigReader("config.json", document)
    n_layers, interval = reader.n_layers(), reader.whole_number("no_rope_layer_interval", 4)
    has_rope = document.setdefault(
        "no_rope_layers", [int((index + 1) % interval != 0) for index in range(n_layers)]
    )
    document.pop("no_rope_layer_interval", None)
    if reader.flag("use_sliding_window", False) and isinstance(has_rope, list):
        types = ["full_attention" if rope else "sliding_attention" for rope in has_rope]
        document = {"layer_types": types if reader.has("sliding_window") else None, **document}
    return prepare_windows({"sliding_window": None, **document})


FORMAT = dense_format(
    {
        "smollm3": ModelType(
            architecture="SmolLM3ForCausalLM",
            config=SmolLM3Model.Config,
            rows=DENSE_ROWS,
            keys={
                **WINDOW_KEYS,
                **{name: name for name in ("attention_bias", "mlp_bias", "no_rope_layers")},
            },
            defaults={
                "num_key_value_heads": 4,
                "tie_word_embeddings": True,
                "rope_theta": 2_000_000.0,
            },
            prepare=_prepare,
            write=lambda config: {"use_sliding_window": config.sliding_window is not None},
        )
    }
)


def _check_positions(config: SmolLM3Model.Config) -> dict[str, object]:
    """Raise `UserError` unless every fourth layer, and no other, is without positions."""
    has_rope = config.no_rope_layers
    fits = all(
        has_rope[index % len(has_rope)] == int((index + 1) % 4 != 0)
        for index in range(config.n_layers)
    )
    require_gguf(fits, "no_rope_layers", has_rope, "[1, 1, 1, 0]")
    return {}


GGUF = gguf_format(
    Architecture(
        name="smollm3", config=SmolLM3Model.Config, rotation=NEIGHBORS, keys=_check_positions
    )
)
