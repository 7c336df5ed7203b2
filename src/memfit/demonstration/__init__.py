"""The demo's work: a small GPT trained on generated text, with several methods. The commands print the results."""
