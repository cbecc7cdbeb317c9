"""The six models of Espresso's evaluation, generated from their architectures: no framework model is built."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.plan.models.bert import bert
from thinwire.plan.models.gpt2 import gpt2
from thinwire.plan.models.lstm import lstm
from thinwire.plan.models.model import Parameter, PublishedModel
from thinwire.plan.models.resnet101 import resnet101
from thinwire.plan.models.ugatit import ugatit
from thinwire.plan.models.vgg16 import vgg16

__all__ = ["MODELS", "Parameter", "PublishedModel", "bert", "gpt2", "lstm", "resnet101", "ugatit", "vgg16"]

MODELS: dict[str, Callable[[], PublishedModel]] = {
    model.__name__: model for model in (vgg16, resnet101, ugatit, bert, gpt2, lstm)
}
