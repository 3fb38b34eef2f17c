"""Programs that use the server through other people's clients, each run by the Python of .venv-clients."""
