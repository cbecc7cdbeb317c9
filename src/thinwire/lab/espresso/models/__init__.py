"""The six models of Espresso's evaluation, generated from their architectures: no framework model is built."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.lab.espresso.models.bert import bert
from thinwire.lab.espresso.models.gpt2 import gpt2
from thinwire.lab.espresso.models.lstm import lstm
from thinwire.lab.espresso.models.model import ModelParameter, PublishedModel
from thinwire.lab.espresso.models.resnet101 import resnet101
from thinwire.lab.espresso.models.ugatit import ugatit
from thinwire.lab.espresso.models.vgg16 import vgg16

__all__ = ["MODELS", "ModelParameter", "PublishedModel", "bert", "gpt2", "lstm", "resnet101", "ugatit", "vgg16"]

MODELS: dict[str, Callable[[], PublishedModel]] = {
    model.__name__: model for model in (vgg16, resnet101, ugatit, bert, gpt2, lstm)
}
