"""Runs training by a plan: records ops, drops what the plan drops, replays it in the backward pass."""
