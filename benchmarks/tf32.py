"""Does TF32 cost TD3 anything? Train on a CPU in float32, or with every matrix product rounded as TF32 rounds.

    python benchmarks/tf32.py --seed 0
    python benchmarks/tf32.py --seed 0 --rounded

NVIDIA GPUs multiply with 10 bits of mantissa by default. Here the inputs of all products of the networks are rounded to as
many, forwards and backwards, and added up in float32. Each line is an evaluation: step, return, mean of Q.
"""

import jax
import tyro
from jaxtyping import Array, Float

from marginax.deep import Population, PopulationConfig, TD3Config
from marginax.deep.networks import MLP


def _rounded(x: Array) -> Array:
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10)


@jax.custom_vjp
def product(x: Float[Array, "n k"], y: Float[Array, "k m"]) -> Float[Array, "n m"]:
    """The matrix product with rounded inputs; so are those of its derivatives."""
    return _rounded(x) @ _rounded(y)


def _backward(inputs: tuple[Array, Array], slope: Array) -> tuple[Array, Array]:
    x, y = map(_rounded, inputs)
    return _rounded(slope) @ y.T, x.T @ _rounded(slope)


product.defvjp(lambda x, y: (product(x, y), (x, y)), _backward)


def rounded_call(network: MLP, inputs: Float[Array, "batch n"]) -> Float[Array, "batch m"]:
    """`MLP.__call__` without layer norm, with rounded products."""
    x = inputs
    for weight, bias in list(zip(network.weights, network.biases, strict=True))[:-1]:
        x = jax.nn.relu(product(x, weight) + bias)
    return product(x, network.weights[-1]) + network.biases[-1]


def main(
    task: str = "pybullet/HalfCheetah",
    seed: int = 0,
    steps: int = 100_000,
    discount: float = 0.98,
    rounded: bool = False,
) -> None:
    """Train one agent with the defaults."""
    if rounded:
        MLP.__call__ = rounded_call
    agent = TD3Config(discount=discount, random_steps=10_000)
    config = PopulationConfig(
        simulator=task,
        groups={"one-step": agent},
        seeds=(seed,),
        steps=steps,
        evaluate_every=25_000,
        episodes=5,
        overlap=True,
    )
    with Population(config) as population:
        population.run(
            report=lambda _, lines: [
                print(f"{line['step']:,}: {line['return']:.0f}, {line['q_mean']:.2f}", flush=True)
                for line in lines
            ]
        )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    tyro.cli(main)
