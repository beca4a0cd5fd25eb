"""TensorFlow GNN: graphs as arguments of a step, and convolutions over their edges.

Its GraphTensor is a composite tensor of TensorFlow's. Graphs of one size, as its padding makes them for TPUs.
"""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_gnn as tfgnn
from helpers.comparing import ONE_DEVICE, assert_close

pytestmark = [pytest.mark.replicas(2), pytest.mark.graphs]

NODES, EDGES, GRAPHS = 4, 6, 8
RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(GRAPHS, NODES, 3)).astype("float32")
SOURCES, TARGETS = RNG.integers(0, NODES, (2, GRAPHS, EDGES)).astype("int32")
LABELS = RNG.normal(size=(GRAPHS, 1)).astype("float32")
WEIGHTS = [RNG.normal(size=shape).astype("float32") for shape in ((3, 4), (4,), (7, 1), (1,))]


def graph(features, source, target):
    return tfgnn.GraphTensor.from_pieces(
        node_sets={"atom": tfgnn.NodeSet.from_fields(sizes=[NODES], features={tfgnn.HIDDEN_STATE: features})},
        edge_sets={
            "bond": tfgnn.EdgeSet.from_fields(
                sizes=[EDGES], adjacency=tfgnn.Adjacency.from_indices(("atom", source), ("atom", target))
            )
        },
    )


def predict(weights, batch):
    """One graph convolution, then the mean over the nodes of each graph."""
    merged = batch.merge_batch_to_components()
    states = merged.node_sets["atom"][tfgnn.HIDDEN_STATE]
    messages = tf.tanh(tfgnn.broadcast_node_to_edges(merged, "bond", tfgnn.SOURCE, feature_value=states) @ weights[0])
    received = tfgnn.pool_edges_to_node(merged, "bond", tfgnn.TARGET, "sum", feature_value=messages + weights[1])
    nodes = tf.concat([states, received], 1) @ weights[2] + weights[3]
    return tfgnn.pool_nodes_to_context(merged, "atom", "mean", feature_value=nodes)


def train(strategy):
    with strategy.scope():
        weights = [tf.Variable(value) for value in WEIGHTS]

    def replica_step(batch, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((predict(weights, batch) - labels) ** 2) / 4
        gradients = tape.gradient(loss, weights)
        loss, gradients = tf.distribute.get_replica_context().all_reduce("sum", (loss, gradients))
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(0.05 * gradient)
        return loss

    dataset = tf.data.Dataset.from_tensor_slices((FEATURES, SOURCES, TARGETS, LABELS))
    dataset = dataset.map(lambda *parts: (graph(*parts[:3]), parts[3])).batch(4, drop_remainder=True)
    step = tf.function(lambda batch, labels: strategy.run(replica_step, args=(batch, labels)))
    losses = [
        strategy.experimental_local_results(step(*batch))[0].numpy()
        for batch in strategy.experimental_distribute_dataset(dataset)
    ]
    return losses, [weight.numpy() for weight in weights]


def test_graphs_as_arguments_come_to_the_numbers_of_one_device(strategy):
    assert_close(train(strategy), train(ONE_DEVICE()))
