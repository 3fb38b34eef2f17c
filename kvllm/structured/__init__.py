"""Structured outputs: grammars, compiled by llguidance, decide which tokens a sequence may have next."""
