"""Decoders in Hugging Face's format: names of weights and config.json, from a table of each
family."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial, reduce
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeVar, get_type_hints

from torchtitan.models.common import hugging_face_keys as shared
from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.hugging_face_rope import (
    check_sections,
    read_rope,
    write_rope,
    write_rope_section,
)
from torchtitan.models.common.moe.rows import fused_expert_rows
from torchtitan.protocols.state_dict_adapter import (
    Concatenated,
    ExternalFormat,
    KeyMapping,
    Match,
    RopePermutation,
    Stacked,
    StateDictAdapter,
    model_tensor_specs,
)
from torchtitan.protocols.tensor_source import TensorSpec
from torchtitan.tools.errors import UserError, errors_of

ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True, kw_only=True)
class ModelType:
    """A `model_type` of transformers."""

    architecture: str
    """Its class in transformers: `LlamaForCausalLM`."""

    config: type[Decoder.Config]
    """Configuration of the model here."""

    rows: Sequence[KeyMapping] | Callable[[Any], Sequence[KeyMapping]]
    """Weight names, without the output head, or a function of the configuration that returns them.
    Rows for tensors that a model lacks are skipped."""

    keys: Mapping[str, str] = field(default_factory=dict)
    """Key → field of `config`, or of a nested field (`moe.top_k`). These keys add to the keys of
    all types (`hugging_face_keys.KEYS`), or replace the field's key there. The field's type defines
    the valid values; a list has one item per layer, and the field holds its shortest repeating
    part."""

    values: Mapping[str, object] = field(default_factory=dict)
    """Field without a key → its value in all models of this type."""

    fixed: Mapping[str, object] = field(default_factory=dict)
    """Key that changes the computation → the only supported value, which is also the default of an
    absent key."""

    defaults: Mapping[str, object] = field(default_factory=dict)
    """Key → value if the key is absent, for keys whose default in transformers differs from the
    field's. With a `partial_rotary_factor`, the type supports other values of it too."""

    ignored: Sequence[str] = ()
    """Keys without effect on the computation."""

    prepare: Callable[[dict[str, object]], dict[str, object]] = dict
    """Rewrite older or redundant keys of the file before reading it."""

    write: Callable[[Any], dict[str, object] | None] = lambda config: {}
    """Return additional keys to write for a `config`. None: this type cannot describe the model;
    nor can it if a field without a key differs from its default. The family's first type that can
    describe the model is written."""

    @property
    def ropes(self) -> dict[str, str | None]:
        """Field of `config` → its section of `rope_parameters`, if layers with windows have their
        own RoPE."""
        has_local = any(field.name == "local_rope" for field in dataclasses.fields(self.config))
        return (
            {"rope": "full_attention", "local_rope": "sliding_attention"}
            if has_local
            else {"rope": None}
        )


def write_if(
    describes: Callable[[Any], bool], write: Callable[[Any], dict[str, object]] = lambda config: {}
) -> Callable[[Any], dict[str, object] | None]:
    """Return a `ModelType.write` for models that the type `describes`."""
    return lambda config: write(config) if describes(config) else None


def module_rows(our: str, their: str, names: Mapping[str, str]) -> tuple[KeyMapping, ...]:
    """Return the rows of weights and biases of the modules in `our` and `their` module with these
    names."""
    return tuple(
        KeyMapping(f"{our}.{o}.{k}", f"{their}.{t}.{k}")
        for o, t in names.items()
        for k in ("weight", "bias")
    )


def attention_rows(
    wo: str = "o_proj", q_norm: str = "q_norm", k_norm: str = "k_norm"
) -> tuple[KeyMapping, ...]:
    """Return the rows of grouped-query attention with all its options."""
    projections = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": wo}
    norms = {"q_norm": q_norm, "k_norm": k_norm, "q_wide_norm": q_norm, "k_wide_norm": k_norm}
    return module_rows("layers.*.attention", "model.layers.*.self_attn", projections | norms)


def interleaved(rows: Sequence[KeyMapping], config: Decoder.Config) -> list[KeyMapping]:
    """Return `rows` for a format that rotates pairs of neighboring elements of queries and keys."""
    head_dim = config.resolved_head_dim
    permutation = RopePermutation(head_dim, config.rope.rotated_dim(head_dim))
    starts = ("layers.*.attention.wq.", "layers.*.attention.wk.")
    return [
        dataclasses.replace(r, transform=permutation) if str(r.internal).startswith(starts) else r
        for r in rows
    ]


def feed_forward_rows(
    w1: str = "gate_proj", w2: str = "down_proj", w3: str = "up_proj"
) -> tuple[KeyMapping, ...]:
    """Return the rows of a feed-forward network; a plain one has no `w3`."""
    return module_rows(
        "layers.*.feed_forward", "model.layers.*.mlp", {"w1": w1, "w2": w2, "w3": w3}
    )


LAST_NORM = module_rows("head", "model", {"norm": "norm"})


def norm_rows(**names: str) -> tuple[KeyMapping, ...]:
    """Return the rows of a block's norms, `attention_norm="input_layernorm"`, and of the last
    norm."""
    return module_rows("layers.*", "model.layers.*", names) + LAST_NORM


FUSED_QKV = tuple(
    KeyMapping(
        tuple(f"layers.*.attention.{name}.{kind}" for name in ("wq", "wk", "wv")),
        f"model.layers.*.self_attn.qkv_proj.{kind}",
        Concatenated(0),
    )
    for kind in ("weight", "bias")
)
"""Queries, keys and values in one tensor."""

FUSED_GATE_UP = KeyMapping(
    ("layers.*.feed_forward.w1.weight", "layers.*.feed_forward.w3.weight"),
    "model.layers.*.mlp.gate_up_proj.weight",
    Concatenated(0),
)
"""Gate and up projection in one tensor."""

EMBEDDING = KeyMapping("tok_embeddings.weight", "model.embed_tokens.weight")


def dense_rows(**norms: str) -> tuple[KeyMapping, ...]:
    """Return the rows of a decoder with Llama's names, except of the norms of a block
    (`norm_rows`)."""
    return (EMBEDDING, *attention_rows(), *feed_forward_rows(), *norm_rows(**norms))


_PER_LAYER = {
    "tok_embeddings": "embed_tokens_per_layer",
    "projection": "per_layer_model_projection",
    "norm": "per_layer_projection_norm",
}
_OWN = {
    "gate": "per_layer_input_gate",
    "out": "per_layer_projection",
    "norm": "post_per_layer_input_norm",
}

SANDWICH_ROWS = (
    *dense_rows(
        attention_norm="input_layernorm",
        attention_post_norm="post_attention_layernorm",
        ffn_norm="pre_feedforward_layernorm",
        ffn_post_norm="post_feedforward_layernorm",
    ),
    KeyMapping("layers.*.layer_scalar", "model.layers.*.layer_scalar"),
    *module_rows("per_layer", "model", _PER_LAYER),
    *module_rows("layers.*.own", "model.layers.*", _OWN),
)
"""Names of weights as in Gemma 2 and 4."""

DENSE_ROWS = dense_rows(attention_norm="input_layernorm", ffn_norm="post_attention_layernorm")
"""Names of weights as in Llama."""


def replaced(rows: Sequence[KeyMapping], *others: KeyMapping) -> tuple[KeyMapping, ...]:
    """Return `rows`, with `others` replacing the rows of the same tensors."""

    def tensors(row: KeyMapping) -> set[str]:
        return {row.internal} if isinstance(row.internal, str) else {*row.internal}

    theirs = set().union(*map(tensors, others))
    return (*(row for row in rows if theirs.isdisjoint(tensors(row))), *others)


_HEAD = KeyMapping("head.output.weight", "lm_head.weight")
_SCORE_HEAD = KeyMapping("head.output.weight", "score.weight")


def dense_format(
    model_types: Mapping[str, ModelType],
    *,
    without: tuple[str, ...] = (),
    renamed: Mapping[str, str] = MappingProxyType({"language_model.": ""}),
    class_rows: Mapping[str, Sequence[KeyMapping]] | None = None,
) -> ExternalFormat:
    """Return the format of a family from its `model_type`s, the preferred one for writing first. A
    type NAME besides NAME_text has vision too; only its language model is read. A type NAME:KEY is
    for files of NAME in which KEY is neither false nor 0 after the `prepare` of NAME.

    Args:
        without: beginnings of the names of tensors that are not read.
        renamed: part of a tensor's name in files → in the rows.
        class_rows: type → rows that replace the rows of the same tensors in the class of
            transformers, if the type's files have another layout. Files in the layout of the class
            are also read. For experts in separate tensors, `fused_expert_rows` is the default.
    """
    for kind in model_types.values():
        named = {name.partition(".")[0] for name in (*kind.keys.values(), *kind.ropes)}
        unknown = named - {field.name for field in dataclasses.fields(kind.config)}
        assert not unknown, (
            f"{kind.architecture}: no fields of {kind.config.__qualname__}: {unknown}"
        )
    return ExternalFormat(
        adapter=lambda config: _adapter_of(_rows_of(model_types, config), config),
        other_adapter=partial(_class_adapter, model_types, class_rows or {}),
        to_external=partial(_to_config_json, model_types),
        from_external=partial(_from_config_json, model_types),
        model_types={
            name: kind.architecture for name, kind in model_types.items() if ":" not in name
        },
        name_of=lambda name: (
            None
            if name.startswith(without)
            else reduce(lambda name, part: name.replace(part, renamed[part]), renamed, name)
        ),
    )


def _written_type(model_types: Mapping[str, ModelType], config: Decoder.Config) -> str:
    """Return the type for writing a model. Raise `UserError` if no type can describe it."""
    for model_type, kind in model_types.items():
        if kind.config is type(config) and kind.write(config) is not None:
            keys = _keys_of(kind)
            known = [*keys.values(), *kind.ropes, "scores"]
            values = {name: attrgetter(name)(config) for name in known}
            values |= {keys[key]: value for key, value in kind.fixed.items() if key in keys}
            values |= kind.values
            if _made(kind.config, values) == config:
                return model_type
    raise UserError(
        f"no model_type of config.json ({', '.join(model_types)}) can describe this model: {config}"
    )


def _class_adapter(
    model_types: Mapping[str, ModelType],
    class_rows: Mapping[str, Sequence[KeyMapping]],
    config: Decoder.Config,
) -> StateDictAdapter | None:
    """Return the table for the class of transformers, with the experts of a layer in one tensor;
    None if it equals the table for the files."""
    rows = _rows_of(model_types, config)
    others = [*class_rows.get(_written_type(model_types, config), ())]
    if any(isinstance(row.transform, Stacked) for row in rows):
        others = [*replaced(fused_expert_rows(), *others)]
    return _adapter_of(replaced(rows, *others), config) if others else None


def _rows_of(model_types: Mapping[str, ModelType], config: Decoder.Config) -> Sequence[KeyMapping]:
    rows = model_types[_written_type(model_types, config)].rows
    return rows(config) if callable(rows) else rows


def _adapter_of(rows: Sequence[KeyMapping], config: Decoder.Config) -> StateDictAdapter:
    specs = model_tensor_specs(dataclasses.replace(config, vocab_size=config.vocab_size or 1))
    n_layers = len({name.split(".")[1] for name in specs if name.startswith("layers.")})
    embedding, output = "model.embed_tokens.weight", "lm_head.weight"
    tied = {output: embedding} if config.tie_embeddings and not config.scores else {}
    copies = {"embed_tokens": embedding, "shared_head.head": tied.get(output, output)}
    tied |= {
        f"model.layers.{i}.{k}.weight": copies[k]
        for i in range(config.n_layers, n_layers)
        for k in copies
    }
    # Files have keys and values of layers that use an earlier layer's (Gemma 4).
    with_queries = {name.split(".")[1] for name in specs if ".attention.wq." in name}
    with_keys = {name.split(".")[1] for name in specs if ".attention.wk" in name}
    unused = [
        f"model.layers.{i}.self_attn.{name}.weight"
        for i in with_queries - with_keys
        for name in ("k_proj", "v_proj", "k_norm")
    ]
    return _Adapter(
        [*rows, _SCORE_HEAD if config.scores else _HEAD],
        n_layers=n_layers,
        only=specs,
        ignored=["model.layers.*.self_attn.rotary_emb.inv_freq", *unused],
        tied=tied,
    )


class _Adapter(StateDictAdapter):
    """A table without the extra layers that predict further tokens (DeepSeek-V3, GLM-4.5), which
    transformers also ignores."""

    def match(self, external: Mapping[str, TensorSpec]) -> Match:
        found, further = super().match(external), f"model.layers.{self.n_layers}."
        if f"{further}eh_proj.weight" not in external:
            return found
        return found._replace(
            unexpected=[name for name in found.unexpected if not name.startswith(further)]
        )


def _from_config_json(
    model_types: Mapping[str, ModelType], document: Mapping[str, object]
) -> Decoder.Config:
    """Return the model that a config.json of transformers 4 or 5 describes; warn of keys with
    unknown effect. Raise `UserError` for another model type, a missing size, or an unsupported
    value."""
    name = document.get("model_type")
    if name not in list(model_types):
        raise UserError(
            f"config.json: model_type is {name!r}, and this family is {' or '.join(model_types)}"
        )
    kind = model_types[name]
    if f"{name}_text" in model_types:
        document = shared.language_model(document, f"{name}_text")
    said = {
        key: value
        for key, value in document.items()
        if value is not None or key not in shared.OPTIONAL
    }
    document = kind.prepare(said)
    for (own_name, _, key), other in (
        (own_name.partition(":"), kind) for own_name, kind in model_types.items()
    ):
        kind = other if key and own_name == document["model_type"] and document.get(key) else kind
    reader = ConfigReader(
        shared.FILE, {**shared.DEFAULTS, **kind.fixed, **kind.defaults, **document}
    )
    keys = _keys_of(kind)
    shared.check_values(document, kind.fixed, {*keys, *kind.ignored})
    values = {
        field_name: reader.value(
            key, _type_of(kind.config, field_name), _least_of(kind.config, field_name)
        )
        for key, field_name in keys.items()
        if key in reader.values or field_name in shared.REQUIRED
    }
    if values["n_kv_heads"] is None:
        values["n_kv_heads"] = values["n_heads"]
    if sections := [section for section in kind.ropes.values() if section]:
        check_sections(reader, sections)
    for name, section in kind.ropes.items():
        values[name] = read_rope(
            reader, rotates_part="partial_rotary_factor" in kind.defaults, layer_type=section
        )
    values |= kind.values
    values["scores"] = shared.describes_scores(document)
    config = _made(kind.config, values)
    if config.head_dim is not None and config.head_dim * config.n_heads == config.dim:
        config.head_dim = None
    with errors_of("config.json"):
        config.validate()
    shared.warn_about_ignored_keys(document, {*keys, *kind.fixed, *kind.ignored})
    return config


def _keys_of(kind: ModelType) -> dict[str, str]:
    own = {*kind.keys.values()}
    return {**{key: name for key, name in shared.KEYS.items() if name not in own}, **kind.keys}


def _owner_of(config: type, name: str) -> type:
    """Return the class that declares a field: `config`, or the type of the field before a point."""
    outer = name.rpartition(".")[0]
    owner = _types_of(config)[outer] if outer else config
    assert isinstance(owner, type)
    return owner


def _type_of(config: type, name: str) -> object:
    """Return the declared type of a field, or of a field's field."""
    return _types_of(_owner_of(config, name))[name.rpartition(".")[2]]


def _least_of(config: type, name: str) -> int:
    """Return the smallest whole number in a field, or in a field's field: 1, or a default of 0.
    Numbers that are not whole are above 0, or have this default."""
    last = name.rpartition(".")[2]
    fields = dataclasses.fields(_owner_of(config, name))
    default = next(field.default for field in fields if field.name == last)
    return 0 if default == 0 else 1


@cache
def _types_of(owner: type) -> Mapping[str, object]:
    """Return the types of a configuration's fields; Python evaluates their annotations each
    time."""
    return get_type_hints(owner)


def _made(config: type[ConfigT], values: Mapping[str, object]) -> ConfigT:
    """Return a configuration with these values of fields; nested fields become one object."""
    plain = {name: value for name, value in values.items() if "." not in name}
    for own in {name.partition(".")[0] for name in values.keys() - plain.keys()}:
        part = {
            name.removeprefix(f"{own}."): values[name]
            for name in values
            if name.startswith(f"{own}.")
        }
        plain[own] = _owner_of(config, f"{own}.")(**part)
    make: Callable[..., ConfigT] = config
    return make(**plain)


def _to_config_json(
    model_types: Mapping[str, ModelType], config: Decoder.Config
) -> dict[str, object]:
    """Return the keys of config.json that the model determines, readable by transformers 4 and
    5."""
    name = _written_type(model_types, config)
    model_type, kind = name.partition(":")[0], model_types[name]
    written = {key: attrgetter(name)(config) for key, name in _keys_of(kind).items()}
    written["pad_token_id"] = None  # some types have a default, which may be outside the vocabulary
    for key, value in written.items():
        if isinstance(value, list):
            written[key] = [value[index % len(value)] for index in range(config.n_layers)]
    # else refused by transformers
    if written.get("layer_types") and written.get("sliding_window") is None:
        written["layer_types"] = [
            layer.replace("sliding", "full") for layer in written["layer_types"]
        ]
    if None in kind.ropes.values():
        rope = write_rope(config.rope, config.max_seq_len)
        if "partial_rotary_factor" in kind.defaults:
            rope["partial_rotary_factor"] = config.rope.rotated_fraction
    else:
        written_ropes = {
            s: write_rope_section(getattr(config, n), config.max_seq_len)
            for n, s in kind.ropes.items()
        }
        rope = {"rope_parameters": written_ropes}
    if config.scores:
        ending = ("Text" if model_type.endswith("_text") else "") + shared.CLASSIFIER
        written |= {
            "architectures": [kind.architecture.replace("ForCausalLM", ending)],
            "num_labels": 1,
        }
    return {
        "architectures": [kind.architecture],
        "model_type": model_type,
        **written,
        "head_dim": config.resolved_head_dim,
        **rope,
        **{
            key: value
            for key, value in {**shared.FIXED, **kind.fixed}.items()
            if key != "is_causal"
        },
        **(kind.write(config) or {}),
    }
