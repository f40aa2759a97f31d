"""surefoot trains foundation models from scratch on PyTorch and explains its own runs.

Importing this package imports nothing else: rooms are imported by name (`surefoot.config`, `surefoot.train`, …).
"""

__version__ = "0.1.0"
