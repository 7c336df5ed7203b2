"""The output projection and the loss of a language model, in chunks of tokens."""
