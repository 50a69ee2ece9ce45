"""TD weights from data by the definitions: loops over episodes, starts and visits, one at a time."""

import equinox as eqx
import numpy as np

import marginax as mx


def episodes(trajectories):
    """Lists of (state, action, next state, ended), an episode each, from a padded and packed batch."""
    fields = [
        np.asarray(f)
        for f in (
            trajectories.states,
            trajectories.actions,
            trajectories.next_states,
            trajectories.discounts,
            trajectories.truncated,
            trajectories.valid,
        )
    ]
    found = []
    for row in zip(*(f.reshape(-1, f.shape[-1]) for f in fields), strict=True):
        current = []
        for x, a, y, discount, truncated, valid in zip(*row, strict=True):
            if not valid:
                break
            current.append((int(x), int(a), int(y), discount == 0))
            if discount == 0 or truncated:
                found.append(current)
                current = []
        if current:
            found.append(current)
    return found


def starts(trajectories, c, on_states):
    """Yields, for every start, its place and the (place, t, C_t) of every visit from there on."""
    for episode in episodes(trajectories):
        for t, (x, a, _, _) in enumerate(episode):
            visits, product = [], 1.0
            for s in range(t, len(episode)):
                y, b = episode[s][:2]
                if s > t:
                    previous = episode[s - 1][:2]
                    product *= c[previous] if on_states else c[y, b]
                visits.append((y if on_states else (y, b), s - t, product))
            yield (x if on_states else (x, a)), visits


def shape(c, on_states):
    return c.shape[:1] * 2 if on_states else c.shape * 2


def index(start, place):
    return (start, place) if isinstance(start, int) else (*start, *place)


def running(trajectories, c, discount, on_states=False):
    """Σ γ^t C_t 1{} / Σ γ^t 1{} over all starts and visits."""
    numerator, denominator = np.zeros(shape(c, on_states)), np.zeros(shape(c, on_states))
    for start, visits in starts(trajectories, c, on_states):
        for place, t, product in visits:
            numerator[index(start, place)] += discount**t * product
            denominator[index(start, place)] += discount**t
    return np.where(denominator > 0, numerator / np.where(denominator > 0, denominator, 1), 0)


def exponential(trajectories, c, discount, step_size, on_states=False):
    """The same sums, each start's moved by step_size towards what followed it, in order."""
    numerator, denominator = np.zeros(shape(c, on_states)), np.zeros(shape(c, on_states))
    for start, visits in starts(trajectories, c, on_states):
        numerator[start] *= 1 - step_size
        denominator[start] *= 1 - step_size
        for place, t, product in visits:
            numerator[index(start, place)] += step_size * discount**t * product
            denominator[index(start, place)] += step_size * discount**t
    return np.where(denominator > 0, numerator / np.where(denominator > 0, denominator, 1), 0)


def algorithm_2(trajectories, c, discount, step_size, on_states=False):
    """Algorithm 2 as printed, looped through the starts along each trajectory."""
    table = np.zeros(shape(c, on_states))
    for start, visits in starts(trajectories, c, on_states):
        total, count = np.zeros(table[start].shape), np.zeros(table[start].shape)
        for place, t, product in visits:
            total[place] += (1 - discount) * discount**t * product
            count[place] += 1
        estimate = np.where(count > 0, total / np.where(count > 0, count, 1), 0)
        table[start] = (1 - step_size) * table[start] + step_size * estimate
    return table


def empirical(trajectories, num_states, num_actions):
    """Transition frequencies p[S, A, S] and action frequencies mu[S, A], zero where there are no data."""
    counts, visits = np.zeros((num_states, num_actions, num_states)), np.zeros((num_states, num_actions))
    for episode in episodes(trajectories):
        for x, a, y, ended in episode:
            visits[x, a] += 1
            if not ended:
                counts[x, a, y] += 1
    total = visits.sum(axis=1, keepdims=True)
    return (
        counts / np.maximum(visits, 1)[..., None],
        visits / np.maximum(total, 1),
    )


def weights_by_powers(p, mu, c, discount, on_states=False):
    """Σ_t γ^t (P^{cμ})^t over Σ_t γ^t (P^μ)^t, term by term."""
    num_states, num_actions = mu.shape

    def total(m):
        if on_states:
            kernel = np.einsum("xa,xay->xy", m, p)
        else:
            kernel = np.einsum("xay,yb->xayb", p, m).reshape(mu.size, mu.size)
        power, result = np.eye(len(kernel)), np.zeros(kernel.shape)
        while power.max() > 1e-14:
            result += power
            power = discount * power @ kernel
        return result

    numerator, denominator = total(c * mu), total(mu)
    ratio = np.where(denominator > 0, numerator / np.where(denominator > 0, denominator, 1), 0)
    return ratio if on_states else ratio.reshape(num_states, num_actions, num_states, num_actions)


def random_problem(seed, states=5, actions=2, discount=0.9):
    """An MDP with missing mass and unlikely transitions, a target, a behaviour with full support, and Retrace's traces."""
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(states, 0.4), (states, actions)) * rng.uniform(0.8, 1.0, (states, actions, 1))
    mdp = mx.TabularMDP(p, rng.normal(size=(states, actions)), discount)
    pi, mu = rng.dirichlet(np.ones(actions), states), rng.dirichlet(np.full(actions, 5.0), states)
    return mdp, pi, mu, mx.traces.retrace(pi, mu, clip=2.0)


def without_behaviour(trajectories):
    return eqx.tree_at(lambda t: t.behaviour, trajectories, None)


def poisoned(trajectories):
    """The same batch with nonsense wherever there is padding."""
    valid = np.asarray(trajectories.valid)

    def spoil(field, value):
        return np.where(valid, np.asarray(field), value).astype(np.asarray(field).dtype)

    return mx.trajectories.Trajectory(
        spoil(trajectories.states, -7),
        spoil(trajectories.actions, 99),
        spoil(trajectories.rewards, np.nan),
        spoil(trajectories.discounts, np.nan),
        spoil(trajectories.next_states, -9),
        spoil(trajectories.truncated, True),
        None if trajectories.behaviour is None else spoil(trajectories.behaviour, np.nan),
        valid,
    )


def least_squares(trajectories, c, discount, features, start_features=None, on_states=False):
    """Rows of a design matrix, one for every start and visit, handed to numpy.linalg.lstsq."""
    rows, values = [], []
    table = shape(c, on_states)
    half = table[: len(table) // 2]
    size = int(np.prod(half))
    psi = np.eye(size).reshape(*half, size) if start_features is None else start_features
    for start, visits in starts(trajectories, c, on_states):
        for place, t, product in visits:
            weight = discount ** (t / 2)
            rows.append(weight * np.outer(psi[start], features[place]).ravel())
            values.append(weight * product)
    theta = np.linalg.lstsq(np.array(rows), np.array(values))[0].reshape(psi.shape[-1], features.shape[-1])
    return (psi.reshape(size, -1) @ theta @ features.reshape(size, -1).T).reshape(table)
