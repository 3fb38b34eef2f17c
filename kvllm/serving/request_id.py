"""Ids of requests: a client may choose one, so they are cleaned before they reach a log or a header."""

from __future__ import annotations

import re
import uuid

MAX_LENGTH = 64
UNSAFE = re.compile(r"[^A-Za-z0-9._:-]")


def clean_request_id(given: str | None) -> str:
    """The id that a client gave, without unsafe characters and cut; a new one if nothing of it is left."""
    return UNSAFE.sub("", given or "")[:MAX_LENGTH] or uuid.uuid4().hex
