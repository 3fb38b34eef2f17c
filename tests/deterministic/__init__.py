"""The whole engine in one thread on a virtual clock: one seed, one trace."""
