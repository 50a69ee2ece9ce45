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


def arrivals(trajectories, c):
    """Yields, for every start, its pair and the (state, t, c_1…c_{t-1}) of every later arrival."""
    for episode in episodes(trajectories):
        for t, (x, a, _, _) in enumerate(episode):
            found, product = [], 1.0
            for s in range(t, len(episode)):
                y, b, following, ended = episode[s]
                if s > t:
                    product *= c[y, b]
                if not ended:
                    found.append((following, s - t + 1, product))
            yield (x, a), found


def paths(trajectories, c, discount):
    """u[S, A, S]: mean product of the traces on the way to each state, over γ^t-weighted arrivals."""
    total, weight = np.zeros((*c.shape, len(c))), np.zeros((*c.shape, len(c)))
    for start, found in arrivals(trajectories, c):
        for y, t, product in found:
            total[start][y] += discount**t * product
            weight[start][y] += discount**t
    return np.where(weight > 0, total / np.where(weight > 0, weight, 1), 0)


def from_paths(u, trajectories, c, discount):
    """w = u c; for the start pair itself the mean of 1 at time 0 and of u c at every later visit."""
    w = u[..., None] * c
    ones, returns = np.zeros(c.shape), np.zeros(c.shape)
    for start, visits in starts(trajectories, c, on_states=False):
        ones[start] += 1
        returns[start] += sum(discount**t for place, t, _ in visits if t > 0 and place == start)
    for x, a in np.argwhere(ones > 0):
        n, r = ones[x, a], returns[x, a]
        w[x, a, x, a] = (n + r * w[x, a, x, a]) / (n + r)
    return w


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
    """Algorithm 2 as printed but for its factor 1-γ, looped through the starts along each trajectory."""
    table = np.zeros(shape(c, on_states))
    for start, visits in starts(trajectories, c, on_states):
        total, count = np.zeros(table[start].shape), np.zeros(table[start].shape)
        for place, t, product in visits:
            total[place] += discount**t * product
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
    """Rows of a design matrix, one for every start and visit (arrival), handed to numpy.linalg.lstsq; u, on states w."""
    rows, values = [], []
    half = c.shape[:1] if on_states else c.shape
    size = int(np.prod(half))
    psi = np.eye(size).reshape(*half, size) if start_features is None else start_features
    for start, visits in starts(trajectories, c, True) if on_states else arrivals(trajectories, c):
        for state, t, product in visits:
            weight = discount ** (t / 2)
            rows.append(weight * np.outer(psi[start], features[state]).ravel())
            values.append(weight * product)
    theta = np.linalg.lstsq(np.array(rows), np.array(values))[0].reshape(psi.shape[-1], features.shape[-1])
    return (psi.reshape(size, -1) @ theta @ features.T).reshape(*half, len(c))


def reverse_td(trajectories, c, discount, mean, on_states=False, sweeps=2000):
    """u by sweeping the reverse TD targets of every start and arrival until nothing changes.

    Traces out of a state are rescaled so that their mean after each start is `mean[x]`.
    """
    half = c.shape[:1] if on_states else c.shape
    moves = {start: [] for start in np.ndindex(half)}
    for episode in episodes(trajectories):
        for t in range(len(episode)):
            start = (episode[t][0],) if on_states else episode[t][:2]
            for s in range(t, len(episode)):
                x, a, y, ended = episode[s]
                moves[start].append((discount ** (s - t), s == t, x, c[x, a], y, ended))
    u = np.ones((*half, len(c)))
    for start, steps in moves.items():
        scale = np.zeros(len(c))
        for x in range(len(c)):
            here = [(weight, trace) for weight, first, z, trace, _, _ in steps if z == x and not first]
            traced = sum(weight * trace for weight, trace in here)
            scale[x] = mean[x] * sum(weight for weight, _ in here) / traced if traced else 0.0
        for _ in range(sweeps):
            total, count = np.zeros(len(c)), np.zeros(len(c))
            for weight, first, x, trace, y, ended in steps:
                if not ended:
                    at_start = trace if on_states else 1.0
                    total[y] += weight * (at_start if first else scale[x] * trace * u[start][x])
                    count[y] += weight
            new = np.where(count > 0, total / np.where(count > 0, count, 1), 0)
            if np.abs(new - u[start]).max() < 1e-13:
                break
            u[start] = new
    return u
