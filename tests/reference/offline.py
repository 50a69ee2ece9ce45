"""Off-policy evaluation written with plain loops, one episode and one step at a time."""

import numpy as np


def episodes_of(log):
    """The log as a list of episodes: lists of (x, a, r, x', terminal, μ)."""
    result = []
    for first, last in zip(log.offsets[:-1], log.offsets[1:], strict=True):
        columns = (log.states, log.actions, log.rewards, log.next_states, log.terminal, log.behaviour)
        result.append([tuple(c[n] for c in columns) for n in range(first, last)])
    return result


def cumulative(episode, pi):
    """ρ_0, ρ_1, … of an episode."""
    product, result = 1.0, []
    for x, a, _, _, _, mu in episode:
        product *= pi[x, a] / mu
        result.append(product)
    return result


def trajectory_is(episodes, pi, gamma):
    terms = []
    for episode in episodes:
        g = sum(gamma**t * step[2] for t, step in enumerate(episode))
        terms.append(cumulative(episode, pi)[-1] * g)
    return sum(terms) / len(terms)


def per_decision_is(episodes, pi, gamma):
    terms = []
    for episode in episodes:
        rho = cumulative(episode, pi)
        terms.append(sum(gamma**t * rho[t] * step[2] for t, step in enumerate(episode)))
    return sum(terms) / len(terms)


def weighted_is(episodes, pi, gamma):
    weights = [cumulative(episode, pi)[-1] for episode in episodes]
    returns = [sum(gamma**t * step[2] for t, step in enumerate(episode)) for episode in episodes]
    return sum(w * g for w, g in zip(weights, returns, strict=True)) / sum(weights)


def over_time(episodes, pi, gamma, term):
    """Σ_t γ^t Σ_i ρ_it term_it / Σ_i ρ_it; terminated episodes stay with weight ρ_T and term 0."""
    rhos = [cumulative(episode, pi) for episode in episodes]
    total = 0.0
    for t in range(max(map(len, episodes))):
        top = bottom = 0.0
        for episode, rho in zip(episodes, rhos, strict=True):
            if t < len(episode):
                top += rho[t] * term(episode[t])
                bottom += rho[t]
            elif episode[-1][4]:
                bottom += rho[-1]
        if bottom > 0:
            total += gamma**t * top / bottom
    return total


def weighted_per_decision_is(episodes, pi, gamma):
    return over_time(episodes, pi, gamma, lambda step: step[2])


def doubly_robust(episodes, pi, gamma, critics):
    """The backward recursion of Jiang and Li; critics[i] for episode i; V(x_T) after a truncation."""
    values = []
    for i, episode in enumerate(episodes):
        q, v = critics[i]
        following = 0.0 if episode[-1][4] else v[episode[-1][3]]
        for x, a, r, _, _, mu in reversed(episode):
            following = v[x] + pi[x, a] / mu * (r + gamma * following - q[x, a])
        values.append(following)
    return sum(values) / len(values)


def weighted_doubly_robust(episodes, pi, gamma, critic):
    """Thomas and Brunskill's form, for one critic."""
    q, v = critic
    start = sum(v[episode[0][0]] for episode in episodes) / len(episodes)

    def error(step):
        x, a, r, following, terminal, _ = step
        return r + (0.0 if terminal else gamma * v[following]) - q[x, a]

    return start + over_time(episodes, pi, gamma, error)


def state_process(episodes, pi, num_states):
    """Ratio-weighted kernel K, mean reward and Σρ of each state, for one-step ratios ρ."""
    mass, rewards = np.zeros(num_states), np.zeros(num_states)
    kernel = np.zeros((num_states, num_states))
    for episode in episodes:
        for x, a, r, following, terminal, mu in episode:
            rho = pi[x, a] / mu
            mass[x] += rho
            rewards[x] += rho * r
            if not terminal:
                kernel[x, following] += rho
    return kernel / mass[:, None], rewards / mass, mass


def state_visits(episodes, pi, starts, gamma, steps):
    """γ^t times the distribution of states at each time t, as the weighted process has it, and Σρ per episode of each state."""
    kernel, _, mass = state_process(episodes, pi, len(starts))
    visits = [starts]
    for _ in range(steps - 1):
        visits.append(gamma * visits[-1] @ kernel)
    return visits, mass / len(episodes)


def state_ratio(episodes, pi, starts, gamma, steps):
    """Σ_t γ^t d_t · r̂ of the weighted process."""
    visits, _ = state_visits(episodes, pi, starts, gamma, steps)
    return sum(d @ state_process(episodes, pi, len(starts))[1] for d in visits)


def doubly_robust_state_ratio(episodes, pi, starts, gamma, critics, folds):
    """Mean of V_0(x_0) + Σ_t Σ_h u_h(x_t) ρ (r + γ V_{h+1}(x') - Q_h(x,a)), u and (Q, V) from the other fold."""
    steps, total = len(critics[0][0]), 0.0
    parts = [[e for e, f in zip(episodes, folds, strict=True) if f != k] for k in (0, 1)]
    found = [state_visits(part, pi, starts, gamma, steps) for part in parts]
    for episode, fold in zip(episodes, folds, strict=True):
        (q, v), (visits, mass) = critics[fold], found[fold]
        total += v[0][episode[0][0]]
        for x, a, r, following, terminal, mu in episode:
            for h in range(steps):
                after = 0.0 if terminal else gamma * v[h + 1][following]
                total += visits[h][x] / mass[x] * pi[x, a] / mu * (r + after - q[h][x, a])
    return total / len(episodes)


def empirical_mdp(episodes, num_states, num_actions):
    """Frequencies p [S,A,S], r [S,A] and starts [S] of the log; zeros where it never went."""
    n = np.zeros((num_states, num_actions))
    p = np.zeros((num_states, num_actions, num_states))
    r, starts = np.zeros_like(n), np.zeros(num_states)
    for episode in episodes:
        starts[episode[0][0]] += 1
        for x, a, reward, following, terminal, _ in episode:
            n[x, a] += 1
            r[x, a] += reward
            if not terminal:
                p[x, a, following] += 1
    safe = np.maximum(n, 1)
    return p / safe[..., None], r / safe, starts / starts.sum(), n


def mean_targets(episodes, q, v, traces, gamma, shape):
    """Multi-step targets from every step, by the definition, averaged over the visits of each pair."""
    total, n = np.zeros(shape), np.zeros(shape)
    for episode in episodes:
        for t, (x, a, *_) in enumerate(episode):
            target, product = q[x, a], 1.0
            for s in range(t, len(episode)):
                y, b, r, following, terminal, _ = episode[s]
                if s > t:
                    product *= gamma * traces[y, b]
                target += product * (r + (0.0 if terminal else gamma * v[following]) - q[y, b])
            total[x, a] += target
            n[x, a] += 1
    return total / np.maximum(n, 1)
