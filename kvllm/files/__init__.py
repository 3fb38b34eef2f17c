"""Where the files of a model come from."""
