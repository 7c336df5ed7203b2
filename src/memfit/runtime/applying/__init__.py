"""Puts plans on models and takes them off."""
