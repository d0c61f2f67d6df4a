r"""Models: softmax attention, the shallow Transformer, the recurrent contrast.

``attention`` holds the calculus of one-query attention, ``shallow`` the network and its closed-form
derivatives as functions of :class:`Parameters`, ``activations`` the smooth bounded activations,
``indrnn`` the independent recurrent units, ``recurrence`` their closed back-propagation.
"""

from attention_dynamics.models.activations import (
    ERF,
    ERF_PLAIN,
    TANH,
    Activation,
    get_activation,
)
from attention_dynamics.models.indrnn import IndRNN
from attention_dynamics.models.parameters import (
    BlockNorms,
    Parameters,
    independent_initialisation,
    symmetric_initialisation,
)
from attention_dynamics.models.shallow import ShallowTransformer, from_column_layout

__all__ = [
    "ERF",
    "ERF_PLAIN",
    "TANH",
    "Activation",
    "BlockNorms",
    "IndRNN",
    "Parameters",
    "ShallowTransformer",
    "from_column_layout",
    "get_activation",
    "independent_initialisation",
    "symmetric_initialisation",
]
