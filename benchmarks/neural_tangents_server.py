"""Runs inside the environment of neural-tangents: one kernel, again for every line it reads.

Arguments: a npz file with c, U, W, query, tokens; the method; a npz file for the kernel. Knows
nothing of the library or of the other benchmarks, which live in another environment.
"""

import json
import sys
import time
import types

# Its TensorFlow interface would install gigabytes, and is not used here.
sys.modules["neural_tangents.experimental"] = types.ModuleType("neural_tangents.experimental")

import jax
import jax.numpy as jnp
import neural_tangents as nt
import numpy as np


def status(field):
    """A field of this process's memory in MB; NaN where the system has no such file."""
    try:
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))
    except OSError:
        return float("nan")


def main():
    problem, method, result = sys.argv[1:]
    arrays = np.load(problem)
    query = jnp.asarray(arrays["query"])
    parameters = tuple(jnp.asarray(arrays[name]) for name in ("c", "U", "W"))
    tokens = jnp.asarray(arrays["tokens"])

    def network(parameters, tokens):
        c, U, W = parameters
        logits = jnp.einsum("ntd,md->nmt", tokens, jnp.einsum("mde,e->md", W, query))
        weights = jax.nn.softmax(logits, axis=-1)
        s = (weights * jnp.einsum("ntd,md->nmt", tokens, U)).sum(-1)
        return (jnp.tanh(s) @ c / c.shape[0] ** 0.5)[:, None]

    kernel = nt.empirical_ntk_fn(
        network,
        trace_axes=(-1,),
        vmap_axes=0,
        implementation=nt.NtkImplementation[method],
    )
    compiled = jax.jit(lambda tokens: kernel(tokens, None, parameters))
    compiled.lower(tokens).compile()
    before = status("VmRSS")
    try:
        with open("/proc/self/clear_refs", "w") as reset:
            reset.write("5")
    except OSError:
        pass
    cpu = time.process_time()
    found = np.asarray(compiled(tokens))
    cpu = time.process_time() - cpu
    np.savez(result, kernel=found)
    print(json.dumps({"peak_mb": status("VmHWM") - before, "cpu": cpu}), flush=True)
    for _ in sys.stdin:
        cpu, wall = time.process_time(), time.perf_counter()
        compiled(tokens).block_until_ready()
        spent = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
        print(json.dumps(spent), flush=True)


if __name__ == "__main__":
    main()
