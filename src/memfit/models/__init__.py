"""Models to try memfit on. Each builder returns a model and a batch, and a loss where the model has none inside.

On the command line they are TARGETs: ``memfit fit memfit.models:gpt --arg layers=12 --budget 300MiB``.
"""

from __future__ import annotations

from memfit.models.gpt_model import gpt
from memfit.models.llama_model import llama
from memfit.models.moe_model import moe
from memfit.models.resnet_model import resnet
from memfit.models.unet_model import unet
from memfit.models.vit_model import vit

__all__ = ["gpt", "llama", "moe", "resnet", "unet", "vit"]
