"""Random regression instances, and the model written as its formulas: loops, matrices, no tricks.

Nothing here is shared with the library but the tuple of factors.
"""

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

from attention_dynamics.models.population import RegressionProblem
from attention_dynamics.models.regression import Factors


@dataclass
class Instance:
    """Factors, queries, contexts and targets of one problem, with or without batch axes."""

    samples: int = 5
    length: int = 6
    outputs: int = 3
    dimension: int = 4
    context_dimension: int = 2
    shared: bool = True
    batch: tuple[int, ...] = ()
    seed: int = 0
    dtype: torch.dtype = torch.float64
    factors: Factors = field(init=False)
    queries: Tensor = field(init=False)
    contexts: Tensor = field(init=False)
    targets: Tensor = field(init=False)

    def __post_init__(self):
        g = torch.Generator().manual_seed(self.seed)

        def normal(*shape):
            drawn = torch.randn((*self.batch, *shape), generator=g, dtype=torch.float64)
            return drawn.to(self.dtype)

        k, own = self.context_dimension, () if self.shared else (self.samples,)
        self.factors = Factors(normal(self.outputs, k), normal(self.dimension, k))
        self.queries = normal(self.samples, self.dimension)
        self.contexts = normal(*own, self.length, k)
        self.targets = normal(self.samples, self.outputs)

    @property
    def arguments(self):
        """What ``forward`` takes."""
        return self.factors, self.queries, self.contexts

    def entry(self, *index):
        """The same instance at one place of its batch."""
        one = Instance(
            self.samples, self.length, self.outputs, self.dimension, self.context_dimension,
            self.shared,
        )  # fmt: skip
        one.factors = self.factors.map(lambda block: block[index])
        one.queries, one.contexts, one.targets = (
            value[index] for value in (self.queries, self.contexts, self.targets)
        )
        return one


def instances(**fixed):
    """A hypothesis strategy of instances without batch axes."""
    sizes = {
        "samples": st.integers(1, 5),
        "length": st.integers(1, 6),
        "outputs": st.integers(1, 4),
        "dimension": st.integers(1, 4),
        "context_dimension": st.integers(1, 4),
        "shared": st.booleans(),
        "seed": st.integers(0, 2**20),
    }
    return st.builds(
        Instance, **{name: sizes[name] for name in sizes if name not in fixed},
        **{name: st.just(value) for name, value in fixed.items()},
    )  # fmt: skip


def weights_by_formula(instance, i):
    """Softmax weights (T,) and context (T, k) of sample i."""
    Z = instance.contexts if instance.shared else instance.contexts[i]
    b = instance.factors.B.mT @ instance.queries[i]
    logits = torch.stack([z @ b for z in Z])
    exponentials = torch.exp(logits - logits.max())
    return exponentials / exponentials.sum(), Z


def output_by_formula(instance, i):
    """The output A mu(B' x_i), summed token by token."""
    alpha, Z = weights_by_formula(instance, i)
    return instance.factors.A @ sum(a * z for a, z in zip(alpha, Z, strict=True))


def loss_by_formula(instance):
    """The loss, sample by sample."""
    total = sum(
        (output_by_formula(instance, i) - y).square().sum() for i, y in enumerate(instance.targets)
    )
    return total / (2 * instance.samples)


def covariance(size, seed, *, rank=None, dtype=torch.float64):
    """A random covariance, of full rank unless a rank is given."""
    g = torch.Generator().manual_seed(seed)
    root = torch.randn((size, rank or 2 * size + 1), generator=g, dtype=torch.float64)
    matrix = root @ root.mT / root.shape[1]
    return (0.5 * (matrix + matrix.mT)).to(dtype)


def problem_of(outputs=3, dimension=4, context_dimension=2, *, noise=0.3, seed=0, **ranks):
    """A random problem; ``query_rank`` and ``token_rank`` make a covariance singular."""
    g = torch.Generator().manual_seed(seed)
    return RegressionProblem(
        torch.randn((outputs, dimension), generator=g, dtype=torch.float64),
        covariance(dimension, seed + 1, rank=ranks.get("query_rank")),
        covariance(context_dimension, seed + 2, rank=ranks.get("token_rank")),
        noise,
    )


def factors_of(problem, *, scale=1.0, seed=0):
    """Random factors that fit a problem."""
    g = torch.Generator().manual_seed(seed)
    k = problem.context_dimension
    return Factors(
        *(
            scale * torch.randn((size, k), generator=g, dtype=torch.float64)
            for size in (problem.outputs, problem.dimension)
        )
    )
