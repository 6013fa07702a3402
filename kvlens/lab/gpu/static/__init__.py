"""A decode step of fixed shapes that runs the same method code as the engine and can be compiled or captured whole."""

from kvlens.lab.gpu.static.batch import BatchDecoder
from kvlens.lab.gpu.static.decoder import StaticDecoder
from kvlens.lab.gpu.static.ring import Ring, RingRecord
from kvlens.lab.gpu.static.session import StaticSession

__all__ = ["BatchDecoder", "Ring", "RingRecord", "StaticDecoder", "StaticSession"]
