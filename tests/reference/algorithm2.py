"""Tabular policy evaluation with Monte Carlo TD weights as a plain loop, straight from Algorithm 2 and the appendix."""

import numpy as np


def evaluate(states, actions, rewards, pi, c, discount, *, kind, step_size=0.1, w=None):
    """Learns Q from episodes that all end by terminating; returns Q after every episode.

    Args:
        states, actions, rewards: lists of episodes, each a sequence.
        pi, c: tables [S, A].
        discount: γ.
        kind: "multi-step", "monte-carlo" (the consistent ratio), "literal" (as printed) or "given" weights `w`.
        step_size: α of both Q and the literal weights.
    """
    num_states, num_actions = pi.shape
    shape = (num_states, num_actions, num_states, num_actions)
    q = np.zeros((num_states, num_actions))
    numerator, denominator, literal = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    history = []
    for x, a, r in zip(states, actions, rewards, strict=True):
        steps = len(x)
        if kind in ("monte-carlo", "literal"):
            for t in range(steps):
                trace = 1.0
                discounted, visits, counts = np.zeros((3, num_states, num_actions))
                for s in range(t, steps):
                    if s > t:
                        trace *= c[x[s], a[s]]
                    discounted[x[s], a[s]] += discount ** (s - t) * trace
                    visits[x[s], a[s]] += discount ** (s - t)
                    counts[x[s], a[s]] += 1
                numerator[x[t], a[t]] += discounted
                denominator[x[t], a[t]] += visits
                once = np.divide((1 - discount) * discounted, counts, out=np.zeros_like(q), where=counts > 0)
                literal[x[t], a[t]] = (1 - step_size) * literal[x[t], a[t]] + step_size * once
        if kind == "monte-carlo":
            w = np.divide(numerator, denominator, out=np.zeros(shape), where=denominator > 0)
        elif kind == "literal":
            w = literal / (1 - discount)
        goals = np.zeros(steps)
        for t in range(steps):
            goal, trace = q[x[t], a[t]], 1.0
            for s in range(t, steps):
                bootstrap = pi[x[s + 1]] @ q[x[s + 1]] if s + 1 < steps else 0.0
                error = r[s] + discount * bootstrap - q[x[s], a[s]]
                if kind == "multi-step":
                    trace *= c[x[s], a[s]] if s > t else 1.0
                    goal += discount ** (s - t) * trace * error
                else:
                    goal += discount ** (s - t) * w[x[t], a[t], x[s], a[s]] * error
            goals[t] = goal
        for t in range(steps):
            q[x[t], a[t]] = (1 - step_size) * q[x[t], a[t]] + step_size * goals[t]
        history.append(q.copy())
    return np.array(history)
