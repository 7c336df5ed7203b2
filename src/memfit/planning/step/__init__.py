"""One profiled step as indexed lists of numbers, and what every plan of it is predicted from."""

from memfit.planning.step.step import NEVER as NEVER
from memfit.planning.step.step import Bytes as Bytes
from memfit.planning.step.step import Step as Step
