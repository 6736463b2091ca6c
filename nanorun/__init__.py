"""nanorun: train your own ChatGPT, from raw text to a page you talk to."""

__version__ = "0.1.0"
