"""Draws how fast weights can contract under a cap, and where the weights of traces and of data lie above that frontier.

    python examples/frontier.py [--out docs/img/frontier.png] [--episodes 300]

For the chain, Open World and a garnet: the mean local contraction rate over start pairs against the largest weight. The
line is the least rate that any weights below the cap can have, by linear programs; nothing lies below it.
"""

import argparse
import time
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np

import marginax as mx

CLIPS = [0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, np.inf]
ESTIMATED_CLIPS = [1.0, 2.0]
TOP = 1.4  # of the vertical axis; what lies above is drawn at its edge with its values


def problems() -> dict[str, mx.problems.Problem]:
    return {
        "Chain (10 states, 5 actions)": mx.problems.chain(10),
        "Open World (8 × 8)": mx.problems.open_world(8),
        "Garnet (20 states, 4 actions)": mx.problems.garnet(20, 4, 3, seed=0, termination=0.05),
    }


def place(problem: mx.problems.Problem, w: np.ndarray) -> tuple[float, float]:
    """The largest weight where μ goes, and the mean local rate."""
    mdp, pi, mu = problem
    seen = mdp.visitation(mu) > 0.0
    return float(w[seen].max()), float(mx.marginalized(mdp, pi, mu, w).contraction_rates().mean())


def draw(axes, title: str, problem: mx.problems.Problem, episodes: int, key: jax.Array) -> None:
    mdp, pi, mu = problem
    ratios = mx.weights.exact(mdp, mu, mx.traces.importance_sampling(pi, mu))
    enough = float(ratios.max())  # the cap that admits the ratios w^{π,μ}
    caps = np.sort(np.append(np.geomspace(0.25, 2.0 * enough, 24), [1.0, enough]))
    begin = time.perf_counter()
    curve = mx.linear_programs.frontier(mdp, pi, mu, caps)
    print(f"{title}: {curve.rates.size} programs in {time.perf_counter() - begin:.1f} s")
    best = curve.rates.mean(axis=(1, 2))
    for cap in (1.0, enough):
        print(f"  frontier at cap {cap:.2f}: mean rate {best[np.searchsorted(caps, cap)]:.3f}")
    axes.fill_between(caps, 0.0, best, color="0.92")
    axes.plot(caps, best, color="black", label="frontier: fastest weights", zorder=3)

    clipped = {clip: mx.traces.retrace(pi, mu, clip=clip) for clip in CLIPS}
    places = np.array([place(problem, mx.weights.exact(mdp, mu, c)) for c in clipped.values()])
    axes.plot(*places.T, "o-", color="tab:blue", markersize=5, linewidth=1, label="Retrace, clip c̄")
    for clip, at in zip(CLIPS, places, strict=True):
        print(f"  Retrace, c̄ = {clip:g}: largest weight {at[0]:.2f}, mean rate {at[1]:.3f}")
        if np.isinf(clip) or (clip in (1.0, 1.5, 3.0) and not np.allclose(at, places[-1])):
            label = "∞" if np.isinf(clip) else f"{clip:g}"
            axes.annotate(label, at, (6, 3), textcoords="offset points", fontsize=8, color="tab:blue")
    for name, traces, style in (
        ("tree backup", mx.traces.tree_backup(pi, mu), "sg"),
        ("one-step", mx.traces.one_step(pi, mu), "Pk"),
    ):
        at = place(problem, mx.weights.exact(mdp, mu, traces))
        print(f"  {name}: largest weight {at[0]:.2f}, mean rate {at[1]:.3f}")
        axes.plot(*at, style, label=name)

    batch = mx.trajectories.sample(mdp, mu, key, episodes=episodes, horizon=100)
    estimators = {
        "certainty equivalence": (
            "D",
            "tab:red",
            lambda c: mx.weights.certainty_equivalence(batch, c, mu=mu),
        ),
        "Monte Carlo": ("^", "tab:orange", lambda c: mx.weights.monte_carlo(batch, c, factored=False)),
    }
    for name, (marker, colour, estimate) in estimators.items():
        found = np.array([place(problem, np.asarray(estimate(clipped[clip]))) for clip in ESTIMATED_CLIPS])
        shown = np.minimum(found, [1.8 * enough, TOP - 0.05])
        axes.plot(*shown.T, marker, color=colour, label=f"{name}, c̄ = 1 and 2, {episodes} episodes")
        for clip, (weight, rate), at in zip(ESTIMATED_CLIPS, found, shown, strict=True):
            print(f"  {name}, c̄ = {clip:g}: largest weight {weight:.2f}, mean rate {rate:.3f}")
            if rate > TOP:
                axes.annotate(
                    f"c̄ = {clip:g}: weight {weight:.3g}, rate {rate:.2g}",
                    at,
                    (-6, -12),
                    textcoords="offset points",
                    ha="right",
                    fontsize=8,
                    color=colour,
                )
    axes.axhline(1.0, color="0.6", linewidth=0.8, linestyle=":")
    axes.set(xscale="log", title=title, xlabel="largest weight", ylim=(0.0, TOP))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("docs/img/frontier.png"))
    parser.add_argument("--episodes", type=int, default=300)
    arguments = parser.parse_args()
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.2), layout="constrained")
    for panel, (title, problem) in zip(axes, problems().items(), strict=True):
        draw(panel, title, problem, arguments.episodes, jax.random.key(0))
    axes[0].set_ylabel("mean local contraction rate")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.out, dpi=110)


if __name__ == "__main__":
    main()
