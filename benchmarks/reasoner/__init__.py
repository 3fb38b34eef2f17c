"""The reasoner: the small trained model KvLLM ships, the task it solves, and how to train it again."""
