"""Trains a Keras model on 1, 2 and 4 replicas, and draws loss and throughput by the number of replicas.

    pip install "replica-engine[tensorflow,demo,plot,xla]"
    python examples/keras_replicas.py [--replicas 1,2,4] [--epochs 5] [--strategy mirrored|tpu] [--output replicas.png]

The model is a small convolutional network, and the data are scikit-learn's handwritten digits. Neither 2 nor 4 divides
the batch size. The curves of the loss coincide, because N replicas compute the same losses as one replica.
"""

import argparse
import time

import keras
import matplotlib

import replica_engine
from replica_engine import logical_devices
from replica_engine.keras import replicate_model

matplotlib.use("Agg")  # writes the picture to a file, without a window
from matplotlib import pyplot
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

BATCH = 51


def build_model():
    """Makes a compiled model: from an image of 8x8 pixels, as a row of 64, to a score for each of the ten digits."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Reshape((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


class Clock(keras.callbacks.Callback):
    """Measures the time of each epoch, in seconds."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(time.perf_counter() - self._began)


def train(strategy, images, labels, test_images, test_labels, epochs):
    """Trains on the replicas of a strategy; returns the loss of each epoch, and the samples per second."""
    model = replicate_model(build_model(), strategy=strategy)
    clock = Clock()
    history = model.fit(images, labels, BATCH, epochs, shuffle=False, callbacks=[clock])  # Keras' own progress bar
    _, accuracy = model.evaluate(test_images, test_labels, verbose=0)
    print(f"{strategy.num_replicas_in_sync} replicas: test accuracy {accuracy:.4f}")
    best = min(clock.seconds[1:] or clock.seconds)  # the first epoch compiles
    return history.history["loss"], len(labels) / best


def draw(results, path):
    """Writes the picture: the loss by epoch, and the throughput by number of replicas."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for style, (count, (losses, _)) in zip(("-", "--", ":", "-."), results.items(), strict=False):
        left.plot(range(1, len(losses) + 1), losses, style, linewidth=2.5, label=f"N = {count}")
    left.set(title="Loss: N replicas train as one does", xlabel="epoch", ylabel="training loss", ylim=0)
    left.xaxis.get_major_locator().set_params(integer=True)
    left.legend()
    bars = right.bar([str(count) for count in results], [rate for _, rate in results.values()])
    right.bar_label(bars, fmt="{:,.0f}")
    right.set(title="Throughput on this machine", xlabel="replicas", ylabel="samples a second")
    figure.savefig(path, dpi=120)


def main():
    """Reads the command line, trains with each number of replicas, and draws the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="1,2,4", help="numbers of replicas to compare")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--strategy", choices=("mirrored", "tpu"), default="mirrored")
    parser.add_argument("--output", default="replicas.png", help="where to write the picture")
    options = parser.parse_args()

    counts = [int(count) for count in options.replicas.split(",")]
    devices = logical_devices(max(counts))
    images, labels = load_digits(return_X_y=True)
    images, test_images, labels, test_labels = train_test_split(images / 16, labels, random_state=0, stratify=labels)
    results = {}
    for count in counts:
        if options.strategy == "mirrored":
            strategy = replica_engine.MirroredStrategy(devices[:count])
        else:
            strategy = replica_engine.TPUStrategy(num_cores=count)
        results[count] = train(strategy, images, labels, test_images, test_labels, options.epochs)
    draw(results, options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
