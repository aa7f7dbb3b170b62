"""What people write with JAX alone, and with Einops."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.optimize
import optax
from einops import einsum, rearrange, reduce, repeat
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.ecosystem.data import ints, normal
from tests.ecosystem.step import Made, steps, trained

SGD = optax.sgd(0.1)


def _mean_square(x: jax.Array, y: jax.Array | float = 0.0) -> jax.Array:
    return jnp.mean((x - y) ** 2)


def scipy_minimize() -> Made:
    """BFGS of `jax.scipy.optimize` as the step."""

    def step(w: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        found = jax.scipy.optimize.minimize(
            lambda w: _mean_square(jnp.tanh(x @ w), y), w, method="BFGS", options={"maxiter": 5}
        )
        return found.x, found.fun

    return Made(step=step, state=0.1 * normal(8), rest=(normal(32, 8, seed=1), normal(32, seed=2)))


def vmapped_samplers() -> Made:
    """Gamma, Poisson and beta numbers, which reject within loops of each example's own length."""

    def step(key: jax.Array, x: jax.Array) -> Any:
        key, *keys = jax.random.split(key, 4)
        rates = jnp.exp(x)
        sample = lambda f, key: jax.vmap(f)(jax.random.split(key, len(x)), rates)
        return key, (
            sample(jax.random.gamma, keys[0]), sample(jax.random.poisson, keys[1]),
            sample(lambda k, r: jax.random.beta(k, r, 2.0), keys[2]),
        )  # fmt: skip

    return Made(step=step, state=jax.random.key(0), rest=(normal(16),))


def custom_vjp() -> Made:
    """A clipped gradient and a straight-through estimator."""

    @jax.custom_vjp
    def clipped(x: jax.Array) -> jax.Array:
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))

    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def quantised(x: jax.Array, levels: int) -> jax.Array:
        return jnp.round(x * levels) / levels

    quantised.defvjp(lambda x, levels: (quantised(x, levels), None), lambda levels, _, g: (g,))

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return _mean_square(quantised(jax.nn.sigmoid(clipped(x @ params[0])), 8) @ params[1], y)

    return trained(loss, [0.3 * normal(16, 32), normal(32, 4)], normal(16, 16), normal(16, 4), optimizer=SGD)


def custom_jvp_under_scan() -> Made:
    """A softplus with its own derivative, 5 times."""

    @jax.custom_jvp
    def softplus(x: jax.Array) -> jax.Array:
        return jnp.logaddexp(x, 0.0)

    softplus.defjvps(lambda t, _, x: jax.nn.sigmoid(x) * t)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return _mean_square(lax.fori_loop(0, 5, lambda _, h: softplus(h @ w) - 0.5, x))

    return trained(loss, 0.3 * normal(16, 16), normal(16, 16), optimizer=SGD)


def _blocks(policy: Any) -> Made:
    """Attention blocks scanned over, under `jax.checkpoint`."""

    def block(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        q, k, v = (checkpoint_name(x @ p[n], n).reshape(*x.shape[:2], 4, 8) for n in "qkv")
        h = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + checkpoint_name(h @ p["o"], "o")
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return _mean_square(lax.scan(jax.checkpoint(block, policy=policy), x, params)[0], y)

    params = {n: 0.1 * normal(3, 32, 32, seed=i) for i, n in enumerate("qkvo")}
    params |= {"up": 0.1 * normal(3, 32, 64, seed=5), "down": 0.1 * normal(3, 64, 32, seed=6)}
    return trained(loss, params, normal(8, 12, 32), normal(8, 12, 32, seed=1), optimizer=SGD)


def remat_scan() -> Made:
    return _blocks(None)


def remat_dots_policy() -> Made:
    return _blocks(jax.checkpoint_policies.dots_with_no_batch_dims_saveable)


def remat_names_policy() -> Made:
    return _blocks(jax.checkpoint_policies.save_only_these_names("q", "o"))


def grouped_query_attention() -> Made:
    """`jax.nn.dot_product_attention` with fewer heads of keys, lengths, a bias and a local window."""

    def loss(params: Any, x: jax.Array, lengths: jax.Array) -> jax.Array:
        heads = lambda n, count: (x @ params[n]).reshape(8, 12, count, 8)
        out = jax.nn.dot_product_attention(
            heads("q", 4), heads("k", 2), heads("v", 2), bias=params["bias"], query_seq_lengths=lengths,
            key_value_seq_lengths=lengths, local_window_size=(4, 0),
        )  # fmt: skip
        return jnp.mean(out**2, where=(jnp.arange(12) < lengths[:, None])[..., None, None])

    params = {
        "q": 0.2 * normal(32, 32),
        "k": 0.2 * normal(32, 16),
        "v": 0.2 * normal(32, 16),
        "bias": normal(1, 4, 12, 12),
    }
    return trained(loss, params, normal(8, 12, 32), 4 + ints(9, 8), optimizer=SGD)


def ragged_experts() -> Made:
    """A mixture of experts: tokens sorted by expert, `lax.ragged_dot`, and back."""

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        gates, chosen = lax.top_k(jax.nn.softmax(x @ params["gate"]), 2)
        order = jnp.argsort(chosen.reshape(-1))
        rows = x[order // 2]
        sizes = jnp.bincount(chosen.reshape(-1), length=4)
        out = lax.ragged_dot(jax.nn.silu(lax.ragged_dot(rows, params["up"], sizes)), params["down"], sizes)
        out = jnp.zeros_like(out).at[order].set(out).reshape(-1, 2, x.shape[1])
        return _mean_square(jnp.einsum("tk,tkd->td", gates, out), y)

    params = {"gate": normal(16, 4), "up": 0.3 * normal(4, 16, 32), "down": 0.3 * normal(4, 32, 16)}
    return trained(loss, params, normal(32, 16), normal(32, 16, seed=1), optimizer=SGD)


def capacity_experts() -> Made:
    """Experts with a capacity: one-hot dispatch and combination."""

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        gates = jax.nn.softmax(x @ params["gate"])
        chosen = jax.nn.one_hot(gates.argmax(-1), 4, dtype=x.dtype)
        place = jnp.cumsum(chosen, 0) * chosen - 1
        dispatch = chosen[..., None] * jax.nn.one_hot(place, 12, dtype=x.dtype)
        rows = jnp.einsum("tec,td->ecd", dispatch, x)
        out = jnp.einsum("ecf,efd->ecd", jax.nn.relu(jnp.einsum("ecd,edf->ecf", rows, params["up"])), params["down"])
        return _mean_square(jnp.einsum("tec,ecd,te->td", dispatch, out, gates), y)

    params = {"gate": normal(16, 4), "up": 0.3 * normal(4, 16, 32), "down": 0.3 * normal(4, 32, 16)}
    return trained(loss, params, normal(32, 16), normal(32, 16, seed=1), optimizer=SGD)


def spectral() -> Made:
    """A Fourier neural operator's layer: real and complex transforms, complex weights."""

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        modes = jnp.fft.rfft(x, axis=1)[:, :6]
        mixed = jnp.einsum("bmi,mio->bmo", modes, lax.complex(params["real"], params["imag"]))
        return _mean_square(jnp.fft.irfft(mixed, n=x.shape[1], axis=1) + x @ params["skip"], y)

    params = {"real": 0.1 * normal(6, 8, 8), "imag": 0.1 * normal(6, 8, 8, seed=1), "skip": 0.3 * normal(8, 8, seed=2)}
    return trained(loss, params, normal(8, 16, 8), normal(8, 16, 8, seed=1), optimizer=SGD)


def sorting() -> Made:
    """Ranks, quantiles, top-k and unique values in a loss."""

    def loss(w: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
        scores = x @ w
        ranked = jnp.take_along_axis(scores, jnp.argsort(scores, axis=0), axis=0)
        best, _ = lax.top_k(scores.T, 4)
        counts = jnp.unique_counts(labels, size=4, fill_value=0).counts
        return _mean_square(ranked[1:] - ranked[:-1]) + jnp.median(scores) ** 2 + (best * counts).mean()

    return trained(loss, normal(16, 4), normal(32, 16), ints(4, 32), optimizer=SGD)


def message_passing() -> Made:
    """Segment sums, maxima and softmax over edges."""

    def loss(params: Any, x: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
        logits = jax.nn.leaky_relu((x[source] * x[target]) @ params["attend"])
        top = jax.ops.segment_max(logits, target, 24)
        weights = jnp.exp(logits - top[target])
        weights = weights / jax.ops.segment_sum(weights, target, 24)[target]
        return _mean_square(jax.ops.segment_sum(weights[:, None] * (x @ params["value"])[source], target, 24))

    params = {"attend": normal(8), "value": normal(8, 8)}
    return trained(loss, params, normal(24, 8), ints(24, 64), ints(24, 64, seed=1), optimizer=SGD)


def contrastive() -> Made:
    """Pairwise distances of all embeddings, and the log-sum-exp of similarities."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        z = x @ w
        distances = jnp.sum((z[:, None] - z[None, :]) ** 2, -1)
        unit = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
        similar = jnp.where(jnp.eye(len(z), dtype=bool), -jnp.inf, unit @ unit.T)
        return jnp.mean(jax.nn.logsumexp(similar, -1)) + jnp.mean(jnp.exp(-distances))

    return trained(loss, 0.3 * normal(16, 8), normal(32, 16))


def kernel_regression() -> Made:
    """A Cholesky solve and the log-determinant of a kernel matrix."""

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        squares = jnp.sum((x[:, None] - x[None]) ** 2 * jnp.exp(params["length"]), -1)
        factor = jnp.linalg.cholesky(jnp.exp(-squares) + 0.1 * jnp.eye(len(x)))
        weights = jax.scipy.linalg.cho_solve((factor, True), y)
        return 0.5 * y @ weights + jnp.sum(jnp.log(jnp.diagonal(factor)))

    return trained(loss, {"length": jnp.zeros(4)}, normal(24, 4), normal(24, seed=1), optimizer=optax.sgd(0.01))


def decompositions() -> Made:
    """Gradients through `eigh`, `svd`, `qr`, `slogdet` and `expm`."""

    def loss(a: jax.Array, x: jax.Array) -> jax.Array:
        symmetric = a @ a.T + jnp.diag(jnp.arange(1.0, 9))
        _, r = jnp.linalg.qr(a + 3 * jnp.eye(8))
        return (
            jnp.sum(jnp.linalg.eigh(symmetric)[0][:3]) + jnp.linalg.svd(a, compute_uv=False)[0]
            + jnp.linalg.slogdet(symmetric)[1] + jnp.sum(jnp.abs(jnp.diagonal(r)))
            + _mean_square(x @ jax.scipy.linalg.expm(0.1 * a))
        )  # fmt: skip

    return trained(loss, normal(8, 8), normal(16, 8), optimizer=optax.sgd(0.01))


def meta_learning() -> Made:
    """Maml: gradients through an inner loop of gradient steps, vmapped over tasks."""

    def net(p: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ p[0]) @ p[1]

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        def task(x: jax.Array, y: jax.Array) -> jax.Array:
            inner = lambda p: _mean_square(net(p, x[:4])[:, 0], y[:4])
            adapt = lambda p, _: (jax.tree.map(lambda a, g: a - 0.1 * g, p, jax.grad(inner)(p)), None)
            adapted, _ = lax.scan(adapt, params, length=3)
            return _mean_square(net(adapted, x[4:])[:, 0], y[4:])

        return jax.vmap(task)(x, y).mean()

    return trained(loss, [0.3 * normal(4, 16), 0.3 * normal(16, 1)], normal(8, 8, 4), normal(8, 8))


def physics_informed() -> Made:
    """Laplacians of a network by nested derivatives (`jax.hessian`, `jax.jvp`)."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        u = lambda x: (jnp.sin(x @ params[0]) @ params[1])[0]
        laplacian = jax.vmap(lambda x: jnp.trace(jax.hessian(u)(x)))(x)
        along = jax.vmap(lambda x: jax.jvp(u, (x,), (jnp.ones_like(x),))[1])(x)
        return _mean_square(laplacian, 1.0) + _mean_square(along)

    return trained(loss, [normal(2, 16), 0.3 * normal(16, 1)], normal(16, 2))


def diffusion() -> Made:
    """A denoiser's step: random times and noise, a schedule looked up, an exponential average of parameters."""

    def loss(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        one, two = jax.random.split(key)
        t = jax.random.randint(one, (len(x),), 0, 50)
        noise = jax.random.normal(two, x.shape, x.dtype)
        kept = jnp.cumprod(1 - jnp.linspace(1e-3, 0.1, 50, dtype=x.dtype))[t][:, None]
        mixed = jnp.sqrt(kept) * x + jnp.sqrt(1 - kept) * noise
        angles = t[:, None] / 10.0 ** jnp.arange(4, dtype=x.dtype)
        features = jnp.concatenate([mixed, jnp.sin(angles), jnp.cos(angles)], -1)
        return _mean_square(jax.nn.silu(features @ params["in"]) @ params["out"], noise)

    tx = optax.adam(1e-3)

    def step(state: Any, x: jax.Array) -> Any:
        params, average, opt_state, key = state
        key, once = jax.random.split(key)
        value, grads = jax.value_and_grad(loss)(params, x, once)
        updates, opt_state = tx.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        return (params, optax.incremental_update(params, average, 0.01), opt_state, key), value

    params = {"in": 0.3 * normal(24, 32), "out": 0.3 * normal(32, 16)}
    return Made(step=step, state=(params, params, tx.init(params), jax.random.key(0)), rest=(normal(16, 16),))


def decoding() -> Made:
    """Greedy decoding with a cache that is written at a running position, until all have ended."""

    def step(params: Any, prompt: jax.Array) -> Any:
        def more(carry: Any) -> jax.Array:
            tokens, _, t = carry
            return (t < 11) & ~jnp.all(jnp.any(tokens == 0, 1))

        def move(carry: Any) -> Any:
            tokens, cache, t = carry
            x = params["embed"][lax.dynamic_index_in_dim(tokens, t, 1, keepdims=False)]
            cache = lax.dynamic_update_slice_in_dim(cache, x[:, None], t, 1)
            weights = jnp.where(jnp.arange(12) <= t, jnp.einsum("bd,btd->bt", x, cache), -jnp.inf)
            h = jnp.einsum("bt,btd->bd", jax.nn.softmax(weights), cache)
            new = jnp.argmax(h @ params["embed"].T, -1).astype(tokens.dtype)
            return lax.dynamic_update_slice_in_dim(tokens, new[:, None], t + 1, 1), cache, t + 1

        tokens = jnp.concatenate([prompt, jnp.full((8, 11), 1, prompt.dtype)], 1)
        cache = jnp.zeros((8, 12, 16), params["embed"].dtype)
        return params, lax.while_loop(more, move, (tokens, cache, jnp.zeros((), jnp.int32)))[0]

    return Made(step=step, state={"embed": normal(32, 16)}, rest=(1 + ints(31, 8, 1),))


def beam_search() -> Made:
    """Beams kept by `top_k` and reordered by gathers, scanned."""

    def step(params: Any, start: jax.Array) -> Any:
        def move(carry: Any, _: Any) -> Any:
            last, score = carry
            total = score[..., None] + jax.nn.log_softmax(params["move"][last])
            score, flat = lax.top_k(total.reshape(8, -1), 4)
            return (flat % 32, score), (flat // 32, flat % 32)

        score = jnp.where(jnp.arange(4) == 0, 0.0, -jnp.inf) * jnp.ones((8, 1))
        (_, score), paths = lax.scan(move, (jnp.repeat(start[:, None], 4, 1), score), None, length=6)
        return params, (score, paths)

    return Made(step=step, state={"move": normal(32, 32)}, rest=(ints(32, 8),))


def branches() -> Made:
    """`lax.cond` and `lax.switch` in the loss, one of them under vmap."""

    def loss(params: Any, x: jax.Array, kind: jax.Array, count: jax.Array) -> jax.Array:
        h = lax.cond(count > 0, lambda: jnp.tanh(x @ params[0]), lambda: x @ params[0])
        kinds = [jnp.sin, jnp.tanh, lambda v: v**2]
        return _mean_square(jax.vmap(lambda i, v: lax.switch(i, kinds, v))(kind, h) @ params[1])

    params = [0.3 * normal(16, 16), 0.3 * normal(16, 4)]
    return trained(loss, params, normal(16, 16), ints(3, 16), jnp.asarray(1), optimizer=SGD)


def associative_scan() -> Made:
    """A diagonal state space layer by `lax.associative_scan`."""

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        decay = jnp.broadcast_to(jax.nn.sigmoid(params["decay"]), x.shape)
        combine = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
        _, h = lax.associative_scan(combine, (decay, x * params["in"]), axis=1)
        return _mean_square(h @ params["out"], y)

    params = {"decay": normal(16), "in": normal(16, seed=1), "out": 0.3 * normal(16, 8, seed=2)}
    return trained(loss, params, normal(8, 16, 16), normal(8, 16, 8, seed=1), optimizer=SGD)


def random_field() -> Made:
    """A conditional random field: forward scores by a scan with lengths, the best path by another, backwards."""

    def step(params: Any, x: jax.Array, tags: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            scores = x @ params["emit"]
            move = lambda a, e: (jax.nn.logsumexp(a[:, :, None] + params["move"], 1) + e, None)
            last, _ = lax.scan(move, scores[:, 0], scores[:, 1:].swapaxes(0, 1))
            gold = (
                jnp.take_along_axis(scores, tags[..., None], -1).sum() + params["move"][tags[:, :-1], tags[:, 1:]].sum()
            )
            return jax.nn.logsumexp(last, -1).sum() - gold

        def best(a: jax.Array, e: jax.Array) -> Any:
            total = a[:, :, None] + params["move"]
            return total.max(1) + e, total.argmax(1)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        scores = (x @ params["emit"]).swapaxes(0, 1)
        last, back = lax.scan(best, scores[0], scores[1:])
        end = last.argmax(-1)
        _, path = lax.scan(lambda t, b: (jnp.take_along_axis(b, t[:, None], 1)[:, 0],) * 2, end, back, reverse=True)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), (loss, path)

    params = {"emit": 0.3 * normal(8, 5), "move": 0.3 * normal(5, 5, seed=1)}
    return Made(step=step, state=params, rest=(normal(8, 10, 8), ints(5, 8, 10)))


def stencil() -> Made:
    """A heat equation by rolls and slices, its conductivity learned through 10 steps."""

    def loss(conductivity: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
        def move(u: jax.Array, _: Any) -> tuple[jax.Array, None]:
            around = sum(jnp.roll(u, s, axis) for s in (1, -1) for axis in (1, 2)) - 4 * u
            u = u + 0.1 * conductivity * around
            return u.at[:, 0].set(0.0).at[:, :, -1].set(1.0), None

        return _mean_square(lax.scan(move, start, None, length=10)[0], end)

    return trained(loss, jnp.ones((16, 16)), normal(8, 16, 16), normal(8, 16, 16, seed=1), optimizer=SGD)


def einops_patches() -> Made:
    """A vision transformer's patches, pooling and mixing by Einops."""

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        patches = rearrange(x, "b (h p) (w q) c -> b (h w) (p q c)", p=4, q=4)
        h = einsum(patches, params["in"], "b n i, i o -> b n o") + repeat(params["place"], "n -> 1 n o", o=32)
        h = h + rearrange(jnp.tanh(rearrange(h, "b n o -> b o n") @ params["mix"]), "b o n -> b n o")
        logits = reduce(h, "b n o -> b o", "mean") @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    params = {
        "in": 0.1 * normal(48, 32), "place": normal(16), "mix": 0.3 * normal(16, 16), "out": 0.3 * normal(32, 4)
    }  # fmt: skip
    return trained(loss, params, normal(8, 16, 16, 3), ints(4, 8))


def named_axes() -> Made:
    """`jax.jit`, `jax.named_call`, `jax.vmap` with axis names and collectives over them, nested."""

    @functools.partial(jax.vmap, axis_name="batch", in_axes=(None, 0))
    @jax.jit
    def normalised(w: jax.Array, x: jax.Array) -> jax.Array:
        h = x @ w
        mean = lax.pmean(h, "batch")
        return (h - mean) / jnp.sqrt(lax.pmean((h - mean) ** 2, "batch") + 1e-5)

    def loss(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        with jax.named_scope("loss"):
            return _mean_square(jnp.tanh(normalised(w, x)), y)

    return trained(loss, normal(16, 8), normal(16, 16), normal(16, 8, seed=1), optimizer=SGD)


STEPS = [
    *steps("jax")(
        custom_vjp, custom_jvp_under_scan, ragged_experts, capacity_experts, spectral, sorting, message_passing,
        decoding, beam_search, branches, associative_scan, random_field, stencil, named_axes, remat_scan,
        remat_dots_policy, remat_names_policy, grouped_query_attention,
    ),
    *steps("jax", float64=True)(
        scipy_minimize, vmapped_samplers, contrastive, kernel_regression, decompositions, meta_learning,
        physics_informed, diffusion,
    ),
    *steps("einops", "jax", float64=True)(einops_patches),
]  # fmt: skip
