"""Credentials, which leave the process in no message, log, record or report."""

import re
from collections.abc import Mapping
from typing import overload

HIDDEN = "***"
"""Takes the place of a credential."""

_NAME = (
    r"[\w.-]*(?:secret|passw(?:or)?d|passphrase|signature|credentials?"
    r"|(?:api|access|account|private)[_-]?key|connection[_-]?string"
    r"|(?:access|auth|session|security|sas|hf|bearer|refresh|id)[_-]?token)"
    r"(?:[_-]?(?:id|key))?"
)
"""Names of options, keys and variables whose values are credentials."""

# Repetitions that may begin anywhere are bounded, so that the time to search a text grows with its
# length only.
_SCHEME = r"([A-Za-z][\w+.-]{1,30}:/{1,3})"

_USER_AND_PASSWORD = r"[^/\s'\"@:]*:(?!\d{1,5}(?:/|$))[^\s'\"@]{1,1000}"
"""The password may have slashes. Not a host with a port, before a path with an @."""

_USER = r"[^/\s'\"@]+"

_PATTERNS = [
    # user:password@ or token@ of a URL, whose slashes `pathlib` joins
    (re.compile(rf"{_SCHEME}{_USER_AND_PASSWORD}(?=@)"), rf"\g<1>{HIDDEN}"),
    (re.compile(rf"{_SCHEME}{_USER}(?=@)"), rf"\g<1>{HIDDEN}"),
    # parameters of signed URLs
    (
        re.compile(
            rf"(?i)([?&;](?:{_NAME}|sig|token|key|AWSAccessKeyId|GoogleAccessId)=)[^&\s'\"]+"
        ),
        rf"\g<1>{HIDDEN}",
    ),
    # name=value, name: value, --name value, "name": "value"
    (
        re.compile(
            rf"(?i)(?<![\w.-])(-{{0,2}}{_NAME}['\"]?\s*"
            r"(?:[=:]\s*|(?<=[\w'])\s+(?=\S{8}))['\"]?)[^\s'\",}&]+"
        ),
        rf"\g<1>{HIDDEN}",
    ),
    (
        re.compile(r"(?i)(['\"](?:token|secret|password)['\"]\s*:\s*['\"])[^'\"]+"),
        rf"\g<1>{HIDDEN}",
    ),
    (
        re.compile(r"(?i)(\bbearer\s+|authorization\W+basic\s+)(?=\S*[\d=])[\w.~+/=-]{12,}"),
        rf"\g<1>{HIDDEN}",
    ),
    # tokens that show what they are: Hugging Face, GitHub, GitLab, AWS, Google, Slack, OpenAI and
    # others
    (
        re.compile(
            r"\b(?:hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}"
            r"|glpat-[\w-]{16,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{30,}|xox[abeprs]-[\w-]{10,}"
            r"|sk-[\w-]{40,}|ya29\.[\w-]{16,})"
        ),
        HIDDEN,
    ),
]


_IN_URL = re.compile(rf"{_SCHEME}({_USER_AND_PASSWORD}|{_USER})@")
_SHORTEST = 6
"""Shorter names and passwords may be parts of other words, and are hidden in URLs only."""

_SHORTEST_TOKEN = 16
"""Shorter text without a password is a user name."""

_known: set[str] = set()


def hide_credentials_of(url: str) -> None:
    """Hide the password or token of a URL from now on in every text of this process: libraries may
    write it without the URL's scheme."""
    if found := _IN_URL.match(url):
        user, _, password = found[2].partition(":")
        # A user name alone is not secret, and may be part of paths. A token instead of it is long.
        if not password and len(user) >= _SHORTEST_TOKEN:
            _known.add(user)
        if len(password) >= _SHORTEST:
            _known.update((found[2], password))


def redact(text: str) -> str:
    """Return the text with `***` for each credential in it: in URLs, assignments, tokens of known
    forms, and those of `hide_credentials_of`."""
    for secret in sorted(_known, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    for pattern, hidden in _PATTERNS:
        text = pattern.sub(hidden, text)
    return text


def unsigned(text: str) -> str:
    """Return redacted text in which no URL has a signature: another signature of the same file
    differs in other parameters too, such as dates."""
    return _ANY_URL.sub(_without_signature, redact(text))


_ANY_URL = re.compile(r"https?://[^\s,]+")


def _without_signature(found: re.Match[str]) -> str:
    address, _, query = found[0].partition("?")
    return address if HIDDEN in query else found[0]


@overload
def redacted(value: Mapping[str, object]) -> dict[str, object]: ...


@overload
def redacted(value: object) -> object: ...


def redacted(value: object) -> object:
    """Return JSON-ready values with `***` for credentials, also in keys. Keys such as `secret` or
    `api_key` name them too."""
    if isinstance(value, Mapping):
        return {_name(key): _of_key(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item) for item in value]
    return redact(value) if isinstance(value, str) else value


def _name(key: object) -> object:
    return redact(key) if isinstance(key, str) else key


def _of_key(key: str, value: object) -> object:
    names_credential = re.fullmatch(rf"(?i){_NAME}|token", key) is not None
    return HIDDEN if names_credential and isinstance(value, str) and value else redacted(value)
