"""The reasoner's tokens: a word is one token, with the space before it; everything else is a token a character."""

from __future__ import annotations

import re
import string

from benchmarks.reasoner import recall

PAD, EOS = "<pad>", "<eos>"
SYMBOLS = string.ascii_letters + string.digits + "#>+-=?,.: \n"
PATTERN = r" ?[a-z]{2,}|[\s\S]"
WORDS = """
short long words read find add times
at we have now and so get over ten that leaves below zero more is all done the answer
plus minus let us check it once yes this gives right line go on with next one carry note code then near
"""
FILLER = (*recall.ADJECTIVES, *recall.NOUNS, *recall.VERBS)
VOCABULARY = [PAD, EOS, *SYMBOLS]
VOCABULARY += [space + word for word in dict.fromkeys((*WORDS.split(), *FILLER)) for space in ("", " ")]
TOKEN_IDS = {token: i for i, token in enumerate(VOCABULARY)}


def encode(text: str) -> list[int]:
    """Raises KeyError for a character or a word that the model has no token for."""
    return [TOKEN_IDS[token] for token in re.findall(PATTERN, text)]
