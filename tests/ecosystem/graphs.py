"""Jraph: networks on graphs, padded batches of edges and nodes."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jraph
import numpy as np
import optax

from tests.ecosystem.data import ints, normal
from tests.ecosystem.step import Made, steps, trained

KEY = jax.random.key(0)


def _batch(graphs: int = 4, nodes: int = 7, edges: int = 15) -> jraph.GraphsTuple:
    rng = np.random.default_rng(0)
    one = lambda i: jraph.GraphsTuple(
        nodes=np.asarray(normal(nodes, 8, seed=i)),
        edges=np.asarray(normal(edges, 4, seed=i)),
        senders=rng.integers(0, nodes, edges),
        receivers=rng.integers(0, nodes, edges),
        n_node=np.array([nodes]),
        n_edge=np.array([edges]),
        globals=np.zeros((1, 8)),
    )
    padded = jraph.pad_with_graphs(jraph.batch_np([one(i) for i in range(graphs)]), 32, 64, graphs + 1)
    return jax.tree.map(jnp.asarray, padded)


class Interaction(nn.Module):
    """`jraph.GraphNetwork` with linen networks for edges, nodes and the whole."""

    @nn.compact
    def __call__(self, graph: jraph.GraphsTuple) -> jax.Array:
        def mlp(width: int) -> Any:
            return jraph.concatenated_args(lambda x: nn.Dense(width)(nn.relu(nn.Dense(16)(x))))

        for _ in range(2):
            graph = jraph.GraphNetwork(mlp(4), mlp(8), mlp(8))(graph)
        return nn.Dense(3)(graph.globals)


def graph_network() -> Made:
    net, graph, labels = Interaction(), _batch(), ints(3, 5)

    def loss(params: Any, graph: jraph.GraphsTuple, labels: jax.Array) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(net.apply(params, graph), labels)
        return jnp.mean(losses, where=jraph.get_graph_padding_mask(graph))

    return trained(loss, net.init(KEY, graph), graph, labels)


def convolution() -> Made:
    """`jraph.GraphConvolution` with symmetric normalisation and self-edges."""
    graph = _batch()
    params = {"one": 0.3 * normal(8, 16, seed=1), "two": 0.3 * normal(16, 3, seed=2)}

    def loss(params: Any, graph: jraph.GraphsTuple) -> jax.Array:
        first = jraph.GraphConvolution(lambda x: jax.nn.relu(x @ params["one"]), add_self_edges=True)
        second = jraph.GraphConvolution(lambda x: x @ params["two"], symmetric_normalization=True)
        return jnp.mean(second(first(graph)).nodes ** 2)

    return trained(loss, params, graph)


def attention() -> Made:
    """`jraph.GAT`: softmax over the edges of each node, with `segment_softmax`."""
    graph = _batch()
    params = {"query": 0.3 * normal(8, 16, seed=1), "logit": 0.3 * normal(36, seed=2)}

    def loss(params: Any, graph: jraph.GraphsTuple) -> jax.Array:
        gat = jraph.GAT(
            lambda x: x @ params["query"],
            lambda s, r, e: jax.nn.leaky_relu(jnp.concatenate([s, r, e], -1) @ params["logit"])[:, None],
            lambda x: jax.nn.elu(x),
        )
        return jnp.mean(gat(graph).nodes ** 2)

    return trained(loss, params, graph)


STEPS = [*steps("jraph", "flax", float64=True)(graph_network, convolution, attention)]
