"""The outputs that are drawn: losses, and metrics that fit their labels."""

from __future__ import annotations

import random

from soak.trainings.spec import Head, Part

POSITIVE = frozenset({"MeanSquaredLogarithmicError", "Poisson", "MeanAbsolutePercentageError"})

_LOGITS = {"from_logits": True}

LOSSES: dict[str, tuple[Part, ...]] = {
    "numbers": (
        *map(
            Part, ("MeanSquaredError", "MeanAbsoluteError", "Huber", "LogCosh", "CosineSimilarity", *sorted(POSITIVE))
        ),
        Part("MeanSquaredError", {"reduction": "sum"}),
        Part("MeanSquaredError", {"reduction": "mean_with_sample_weight"}),
        Part("own_loss"),
    ),
    "binary": (
        Part("BinaryCrossentropy", {"label_smoothing": 0.1}),
        *map(Part, ("BinaryCrossentropy", "BinaryFocalCrossentropy", "Hinge", "SquaredHinge", "Dice", "Tversky")),
    ),
    "one_hot": (
        Part("CategoricalCrossentropy", {"label_smoothing": 0.1}),
        *map(Part, ("CategoricalCrossentropy", "CategoricalFocalCrossentropy", "KLDivergence", "CategoricalHinge")),
    ),
    "classes": (
        Part("SparseCategoricalCrossentropy"),
        Part("SparseCategoricalCrossentropy", _LOGITS),
        Part("SparseCategoricalCrossentropy", {**_LOGITS, "ignore_class": -1}),
    ),
}

METRICS: dict[str, tuple[Part, ...]] = {
    "numbers": (
        *map(Part, ("MeanSquaredError", "MeanAbsoluteError", "RootMeanSquaredError", "R2Score", "CosineSimilarity")),
        *map(Part, ("LogCoshError", "MeanAbsolutePercentageError", "own_metric", "largest_error")),
        Part("PearsonCorrelation", {"axis": 0}),
        Part("ConcordanceCorrelation", {"axis": 0}),
    ),
    "binary": (
        Part("AUC", {"num_thresholds": 50}),
        Part("AUC", {"num_thresholds": 11, "curve": "PR", "summation_method": "minoring"}),
        Part("Recall", {"thresholds": [0.3, 0.6]}),
        *map(Part, ("BinaryAccuracy", "Precision", "TruePositives", "FalseNegatives", "Hinge", "BinaryCrossentropy")),
        Part("PrecisionAtRecall", {"recall": 0.5, "num_thresholds": 20}),
        Part("SensitivityAtSpecificity", {"specificity": 0.5, "num_thresholds": 20}),
        Part("F1Score", {"threshold": 0.5}),
        Part("FBetaScore", {"beta": 2.0, "threshold": 0.4}),
        Part("BinaryIoU", {"target_class_ids": [0, 1]}),
    ),
    "one_hot": (
        *map(Part, ("CategoricalAccuracy", "CategoricalHinge", "CategoricalCrossentropy", "KLDivergence", "Precision")),
        Part("TopKCategoricalAccuracy", {"k": 2}),
        Part("F1Score", {"average": "macro"}),
        Part("F1Score"),
        Part("OneHotMeanIoU", {"num_classes": 3}),
        Part("AUC", {"multi_label": True, "num_labels": 3, "num_thresholds": 10}),
    ),
    "classes": (
        *map(Part, ("SparseCategoricalAccuracy", "SparseCategoricalCrossentropy")),
        Part("SparseTopKCategoricalAccuracy", {"k": 2}),
        Part("MeanIoU", {"num_classes": 3, "sparse_y_pred": False, "ignore_class": -1}),
    ),
}


def drawn(draw: random.Random, dtype: str) -> tuple[Head, ...]:
    """One output or two."""
    return tuple(_head(draw, dtype) for _ in range(2 if draw.random() < 0.25 else 1))


def _head(draw: random.Random, dtype: str) -> Head:
    labels = draw.choice(("numbers", "numbers", "binary", "one_hot", "classes"))
    loss, metrics = draw.choice(LOSSES[labels]), list(METRICS[labels])
    # What plain Keras refuses: an ignored class here, top k of float64, sample weights for correlations.
    if "ignore_class" in loss.options:
        metrics = [each for each in metrics if each.name != "SparseCategoricalCrossentropy"]
    if dtype == "float64":
        metrics = [each for each in metrics if each.name != "SparseTopKCategoricalAccuracy"]
    weighted = [each for each in metrics if not each.name.endswith("Correlation")]
    return Head(
        labels,
        loss,
        tuple(draw.sample(metrics, min(len(metrics), draw.choice((0, 1, 1, 2, 3))))),
        tuple(draw.sample(weighted, draw.choice((0, 0, 0, 1)))),
        positive=loss.name in POSITIVE,
        logits="from_logits" in loss.options,
    )
