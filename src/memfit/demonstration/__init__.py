"""The demo's work: a small GPT trained on generated text, in several ways. What is shown is up to the commands."""
