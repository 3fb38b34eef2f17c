"""The constraint of one request on its text: a JSON schema, a regular expression, a choice or a grammar."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from msgspec.structs import force_setattr

from kvllm.config import Options, Refused, check_types, require
from kvllm.errors import ConfigError

KINDS = ("json", "json_object", "regex", "choice", "grammar")


class StructuredOutputsParams(Options, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A rule that a completion's text obeys from its first to its last character. Exactly one of the first five.

    Names are those of vLLM. A wrong value raises ConfigError when constructed. A rule that cannot be compiled is
    refused with the request.

    Attributes:
        json: a JSON schema, as text or as a dict (stored as text). White space between tokens is free. Keywords that
            cannot be enforced are left out; `"x-guidance": {"lenient": false}` in the schema refuses them.
        json_object: True for any JSON object.
        regex: a regular expression that the whole text matches, in the syntax of Rust's regex crate: Python's without
            look-around and backreferences. Digits and letters (`\\d`, `\\w`) are those of ASCII.
        choice: strings, one of which is the text.
        grammar: a grammar, in the Lark syntax of llguidance or in GBNF.
        disable_any_whitespace: no white space between tokens of JSON, with `json` and `json_object`.
        free_end: text that ends a free part before the rule begins, such as "</think>".
        free_start: text that begins the free part, such as "<think>". With it, the completion may leave that part out;
            without it, the completion is in the free part from the start.
        free_openings: texts, one of which may stand between the free part and what obeys the rule.
    """

    REFUSED: ClassVar[Refused] = {
        "backend": (("auto", "guidance"), "llguidance compiles all rules"),
        "disable_fallback": ((True, False), "there is one engine of grammars"),
        "disable_additional_properties": ((False,), "say additionalProperties in the schema"),
        "whitespace_pattern": ((), "white space in JSON is free, or there is none: disable_any_whitespace"),
        "structural_tag": ((), "use grammar"),
    }

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    free_end: str | None = None
    free_start: str | None = None
    free_openings: list[str] | None = None

    def __post_init__(self) -> None:
        check_types(self)
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            found = f"{len(given)} ({', '.join(given)})" if given else "none"
            raise ConfigError(f"structured_outputs has {found} of {', '.join(KINDS)}: give exactly one")
        require(self.json_object is not False, "json_object", self.json_object, "True, or None")
        require(self.choice != [], "choice", self.choice, "at least one string")
        for field in ("free_end", "free_start"):
            require(getattr(self, field) != "", field, "", "at least one character, or None")
        only_start = self.free_start is not None and self.free_end is None
        require(not only_start, "free_start", self.free_start, "only together with free_end")
        if isinstance(self.json, dict):
            try:
                force_setattr(self, "json", json.dumps(self.json, ensure_ascii=False))
            except (TypeError, ValueError, RecursionError) as error:
                raise ConfigError(f"json is not a JSON schema: {error}") from None
