"""Layers whose activation memory depends on a chunk of the sequence and not on its length."""

from usp.nn.blockwise import Blockwise, blockwise
from usp.nn.layer import TransformerLayer, rope

__all__ = ["Blockwise", "TransformerLayer", "blockwise", "rope"]
