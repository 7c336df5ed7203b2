"""Models to try memfit on: builders of small training steps, each in its own file."""
