"""Scripts that measure how compression changes answers and predictions."""
