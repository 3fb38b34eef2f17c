"""The tables and figures of the Kara paper, measured with this engine."""
