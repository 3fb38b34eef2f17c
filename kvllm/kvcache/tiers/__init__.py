"""Tiers below the KV pool: where blocks go that leave it, and come back from."""
