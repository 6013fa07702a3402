"""A decode step of fixed shapes that runs the same method code as the engine and can be compiled or captured whole."""

from kvlens.static.batch import BatchDecoder
from kvlens.static.decoder import StaticDecoder
from kvlens.static.ring import Ring, Told
from kvlens.static.session import StaticSession

__all__ = ["BatchDecoder", "Ring", "StaticDecoder", "StaticSession", "Told"]
