from .types import Problem

__all__ = ["Problem"]
