r"""Attention dynamics: how gradient descent trains softmax attention.

The library under the book. Subpackages, from the ground up:

``models``        softmax attention and the shallow Transformer, closed-form gradients
``data``          tokens and seeded random streams
``theory``        transportation maps, linearisation, explicit constants and bounds
``training``      projection sets and projected gradient descent
``experiments``   one module an experiment, all of one shape
``running``       resumable sweeps, their store, and what verifies it
``commands``      what is behind the words of the command line
``verification``  machine checks of every numbered statement in the book
"""

__version__ = "0.1.0"
