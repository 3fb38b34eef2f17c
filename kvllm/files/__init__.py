"""Where models come from: the files of a checkpoint, whatever their format, as one interface."""
