"""Where chat templates come from: a model's folder, a file, or the built-in ones."""

import json
from collections.abc import Sequence
from pathlib import Path

from torchtitan.components.chat_template.built_in import BUILT_IN_TEMPLATES, REQUIRED_TOKENS
from torchtitan.components.chat_template.template import ChatTemplate
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import file_to_copy, read_object

_WITH_TOOLS = "additional_chat_templates/tool_use.jinja"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def resolve_chat_template(
    name_or_path: str, folders: Sequence[Path], tokenizer: Tokenizer, *, option: str = "--dataloader.chat_template"
) -> ChatTemplate:
    """The template that is meant by a user.

    Args:
        name_or_path: empty: the model's own one. A name of `BUILT_IN_TEMPLATES`, whose BOS (if the tokenizer adds one)
            and EOS become those of the tokenizer. Or a file: Jinja, or a `tokenizer_config.json` that has one.
        folders: the model's, where its own template is looked for, see `load_chat_template`.
        tokenizer: what the texts will be encoded with.
        option: where the user sets `name_or_path`, for messages.

    Raises:
        UserError: if there is no such template, or it cannot be read or used with the tokenizer.
    """
    if name_or_path in BUILT_IN_TEMPLATES:
        return _built_in(name_or_path, tokenizer)
    if not name_or_path:
        template = load_chat_template(*folders)
        if template is None:
            raise UserError(
                f"there is no chat template in {' or '.join(map(str, folders)) or 'the model'} (chat_template.jinja, "
                "or chat_template in tokenizer_config.json): the model may not know conversations; "
                f"{option} {'|'.join(BUILT_IN_TEMPLATES)} sets one, as does a file"
            )
        return template
    return _from_file(Path(name_or_path), folders, tokenizer, option)


def load_chat_template(*folders: Path) -> ChatTemplate | None:
    """The template in the first of a model's folders that has one: `chat_template.jinja`, else `chat_template` of
    `tokenizer_config.json`; None where there is none.

    A model may have several with names, in `additional_chat_templates/` or as a list: then it is `tool_use` that writes
    the conversations with tools, and `default` the others, as in transformers.

    It can read the special tokens that `tokenizer_config.json` names or, where it does not, `special_tokens_map.json`.

    Raises:
        UserError: if there is one that cannot be read, or whose part for tools is a link out of the folder.
    """
    for folder in folders:
        file = folder / "chat_template.jinja"
        file = file if file.is_file() else folder / "tokenizer_config.json"
        source = _read(file) if file.is_file() else None
        if source is not None and file.suffix == ".jinja" and (folder / _WITH_TOOLS).is_file():
            # What a run trains with is copied into its checkpoints.
            source = _chosen_by_tools(source, _read_text(file_to_copy(folder, _WITH_TOOLS)), str(folder))
        if source is not None:
            return ChatTemplate(source, _tokens_of(folders), f"the chat template in '{file}'", of_model=True)
    return None


def _built_in(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    source = BUILT_IN_TEMPLATES[name]
    if "eos_token" in source and tokenizer.eos_id is None:
        raise UserError(
            f"the chat template {name} ends answers with EOS, which the tokenizer does not have; try chatml"
        )
    # Written into it, so that it renders the same wherever it is read, whichever tokens are declared there.
    bos = tokenizer.bos_id if tokenizer.adds_bos else None
    texts = {"bos_token": _spelt(bos, tokenizer), "eos_token": _spelt(tokenizer.eos_id, tokenizer)}
    tokens = "".join(f"{{%- set {key} = {json.dumps(text)} %}}\n" for key, text in texts.items() if key in source)
    required = REQUIRED_TOKENS.get(name, ())
    return ChatTemplate(tokens + source, name=f"the built-in chat template {name}", required_tokens=required)


def _from_file(path: Path, folders: Sequence[Path], tokenizer: Tokenizer, option: str) -> ChatTemplate:
    if not path.is_file():
        raise UserError(
            f"{option} {path} is neither a file nor the name of a built-in template: {', '.join(BUILT_IN_TEMPLATES)}"
        )
    source = _read(path)
    if source is None:
        raise UserError(f"{option}: '{path}' has no chat_template")
    own = {"bos_token": _spelt(tokenizer.bos_id, tokenizer), "eos_token": _spelt(tokenizer.eos_id, tokenizer)}
    return ChatTemplate(source, own | _tokens_of(folders), f"the chat template in '{path}'")


def _spelt(token_id: int | None, tokenizer: Tokenizer) -> str:
    return "" if token_id is None else tokenizer.decode([token_id])


def _read(file: Path) -> str | None:
    """The template in a file of either kind; None where a `tokenizer_config.json` has none."""
    return _declared(file) if file.suffix == ".json" else _read_text(file)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the chat template '{file}' cannot be read: {error}") from error


def _declared(file: Path) -> str | None:
    declared = read_object(file).get("chat_template")
    if isinstance(declared, list):
        keys = ("name", "template")
        if not all(isinstance(entry, dict) and all(isinstance(entry.get(k), str) for k in keys) for entry in declared):
            raise UserError(f"'{file}' has a list of chat templates, and must have a name and a template in each entry")
        declared = _of_names({entry["name"]: entry["template"] for entry in declared}, file)
    if not (declared is None or isinstance(declared, str)):
        raise UserError(f"'{file}' has the chat_template {declared!r}, and must have a text or a list of named ones")
    return declared


def _of_names(templates: dict[str, str], file: Path) -> str:
    if "default" not in templates:
        raise UserError(
            f"'{file}' has the chat templates {', '.join(templates) or '(none)'}, and none is named default; "
            "write the one that is meant into a file, and name that"
        )
    if "tool_use" in templates:
        return _chosen_by_tools(templates["default"], templates["tool_use"], str(file))
    return templates["default"]


def _chosen_by_tools(default: str, with_tools: str, where: str) -> str:
    """One template that writes what `with_tools` does where there are tools, and what `default` does elsewhere."""
    names = {"default": default, "tool_use": with_tools}
    marked = {name: ChatTemplate(text, name=f"the chat template {name} in '{where}'") for name, text in names.items()}
    if len({template.marks_generation for template in marked.values()}) > 1:
        raise UserError(
            f"of the chat templates default and tool_use in '{where}' one marks by {{% generation %}} what the "
            "assistant writes, and the other does not; write marks into both, or into neither"
        )
    # Jinja takes away a template's last newline, the first one behind a tag, and, unless there is a `+`, blanks before.
    default, with_tools = (text.removesuffix("\n").removesuffix("\r") for text in (default, with_tools))
    return f"{{% if tools is defined and tools is not none %}}\n{with_tools}{{%+ else %}}\n{default}{{%+ endif %}}"


def _tokens_of(folders: Sequence[Path]) -> dict[str, str]:
    """The special tokens that the folders declare; those of the first folder win."""
    return {name: text for folder in reversed(folders) for name, text in _special_tokens(folder).items()}


def _special_tokens(folder: Path) -> dict[str, str]:
    texts = {}
    # The second wins, as for the tokenizer's ids. (In transformers, which reads the first one only where the second has
    # no `added_tokens_decoder`, it wins then: that shows only where the two contradict each other.)
    for path in (folder / "special_tokens_map.json", folder / "tokenizer_config.json"):
        content = read_object(path)
        for name in _SPECIAL_TOKENS:
            # A token is written as a string or, by older versions, as an object.
            token = content.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if text is not None and not isinstance(text, str):
                raise UserError(f"'{path}' has {name} {token!r}, which is not a token")
            if text:
                texts[name] = text
    return texts
