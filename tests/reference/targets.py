"""Targets written as the paper writes them: for one start at a time, a sum over the steps that follow it.

Plain Python loops on floats. A step ends what its start can reach if it is terminal (discount 0), truncated,
or last.
"""


def reach(t, discounts, truncated):
    """The steps s = t, t+1, ... up to the end of the episode, or to where it is cut off."""
    for s in range(t, len(discounts)):
        yield s
        if discounts[s] == 0 or truncated[s]:
            return


def bellman_error(s, values, v_next, rewards, discounts):
    bootstrap = 0.0 if discounts[s] == 0 else discounts[s] * v_next[s]
    return rewards[s] + bootstrap - values[s]


def multi_step(q, v_next, rewards, discounts, traces, truncated):
    """Q(x_t,a_t) + Σ_s γ^{s-t} (c_{t+1} ... c_s) Δ_s."""
    targets = []
    for t in range(len(q)):
        target, gamma_power, cumulative_trace = q[t], 1.0, 1.0
        for s in reach(t, discounts, truncated):
            if s > t:
                gamma_power *= discounts[s - 1]
                cumulative_trace *= traces[s]
            target += gamma_power * cumulative_trace * bellman_error(s, q, v_next, rewards, discounts)
        targets.append(target)
    return targets


def marginalized(q, v_next, rewards, discounts, weights, truncated):
    """Q(x_t,a_t) + Σ_s γ^{s-t} w_{x_t,a_t}(x_s,a_s) Δ_s, with weights[t][s]."""
    return marginalized_vtrace(q, v_next, rewards, discounts, weights, [1.0] * len(q), truncated)


def vtrace(v, v_next, rewards, discounts, traces, rhos, truncated):
    """V(x_t) + Σ_s γ^{s-t} (c_t ... c_{s-1}) ρ_s Δ_s."""
    targets = []
    for t in range(len(v)):
        target, gamma_power, cumulative_trace = v[t], 1.0, 1.0
        for s in reach(t, discounts, truncated):
            if s > t:
                gamma_power *= discounts[s - 1]
                cumulative_trace *= traces[s - 1]
            error = bellman_error(s, v, v_next, rewards, discounts)
            target += gamma_power * cumulative_trace * rhos[s] * error
        targets.append(target)
    return targets


def marginalized_vtrace(v, v_next, rewards, discounts, weights, rhos, truncated):
    """V(x_t) + Σ_s γ^{s-t} w_{x_t}(x_s) ρ_s Δ_s, with weights[t][s]."""
    targets = []
    for t in range(len(v)):
        target, gamma_power = v[t], 1.0
        for s in reach(t, discounts, truncated):
            if s > t:
                gamma_power *= discounts[s - 1]
            error = bellman_error(s, v, v_next, rewards, discounts)
            target += gamma_power * weights[t][s] * rhos[s] * error
        targets.append(target)
    return targets


def multi_step_at_random_time(q, v_next, rewards, discounts, traces, truncated, stop, gamma):
    """Q(x_t,a_t) + (1-γ)^{-1} (c_{t+1} ... c_τ) Δ_τ, or Q alone where the episode is over before τ."""
    targets = []
    for t in range(len(q)):
        target, cumulative_trace = q[t], 1.0
        for s in reach(t, discounts, truncated):
            if s > t:
                cumulative_trace *= traces[s]
            if stop[s]:
                error = bellman_error(s, q, v_next, rewards, discounts)
                target += cumulative_trace * error / (1 - gamma)
                break
        targets.append(target)
    return targets


def marginalized_at_random_time(q, v_next, rewards, discounts, weights, truncated, stop, gamma):
    """Q(x_t,a_t) + (1-γ)^{-1} w_{x_t,a_t}(x_τ,a_τ) Δ_τ, or Q alone where the episode is over before τ."""
    targets = []
    for t in range(len(q)):
        target = q[t]
        for s in reach(t, discounts, truncated):
            if stop[s]:
                target += weights[t][s] * bellman_error(s, q, v_next, rewards, discounts) / (1 - gamma)
                break
        targets.append(target)
    return targets


def n_step(v_next, rewards, discounts, n, truncated):
    """r_t + γ r_{t+1} + ... + γ^k V(x_{t+k}), with k = n or as many steps as there are."""
    targets = []
    for t in range(len(rewards)):
        target, gamma_power = 0.0, 1.0
        within = list(reach(t, discounts, truncated))[:n]
        for s in within:
            target += gamma_power * rewards[s]
            gamma_power *= discounts[s]
        targets.append(target + (gamma_power * v_next[within[-1]] if gamma_power else 0.0))
    return targets


def peng(v_next, rewards, discounts, traces, truncated):
    """A mixture of n-step returns: the k-step one has weight c_{t+1} ... c_{t+k-1} (1 - c_{t+k})."""
    targets = []
    for t in range(len(rewards)):
        target, cumulative_trace = 0.0, 1.0
        within = list(reach(t, discounts, truncated))
        for k, s in enumerate(within, start=1):
            share = 1.0 if s == within[-1] else 1.0 - traces[s + 1]
            target += cumulative_trace * share * n_step(v_next, rewards, discounts, k, truncated)[t]
            if s != within[-1]:
                cumulative_trace *= traces[s + 1]
        targets.append(target)
    return targets
