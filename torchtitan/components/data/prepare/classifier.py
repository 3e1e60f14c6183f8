"""A linear classifier of documents, trained on a user's examples: hashed words and pairs of words,
as in fastText (Joulin et al. 2016, arXiv:1607.01759), without hidden layer; logistic regression by
stochastic gradient descent. Both are scikit-learn's."""

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchtitan.components.data.sources.rows import Document, evenly
from torchtitan.components.data.sources.source import Source
from torchtitan.tools.digests import bytes_digest
from torchtitan.tools.errors import UserError

if TYPE_CHECKING:
    from sklearn.feature_extraction.text import HashingVectorizer

_FEATURES = 1 << 20
_CHARACTERS = 1 << 20
"""Characters of a document that count, from its start."""

_MOST_BYTES = 1 << 28
"""Maximum bytes of examples of one kind that are read, evenly over all of them."""

_BATCH = 1 << 22
"""Characters that are hashed at a time."""

_HELD_OUT = 10
"""One example in this many is not trained, but measures the classifier."""

_LEAST = 20
_PASSES = 5


class Measured(NamedTuple):
    """A trained classifier on examples that it was not trained on, and its speed."""

    examples: int
    accuracy: float
    """Right signs of scores, the mean of both kinds."""
    ranked: float
    """Probability that a positive example has a higher score than a negative one (area under the
    ROC curve)."""
    by_chance: float
    """`ranked` that 1 of 40 classifiers surpasses whose scores are random (the normal distribution
    of Mann and Whitney's U)."""
    seconds_per_byte: float
    """Processor seconds, of hashing the examples."""


@dataclass(frozen=True)
class Classifier:
    """Scores of documents: log-odds to be like the positive examples."""

    weights: NDArray[np.float64]
    """(features,)"""
    bias: float
    measured: Measured

    @property
    def identity(self) -> str:
        """Digest of everything that determines scores."""
        return bytes_digest(self.weights.tobytes() + np.float64(self.bias).tobytes())

    def scores(self, documents: Iterable[Document]) -> NDArray[np.float32]:
        """Return the score of each document, (n,), with bounded memory."""
        hashed = _vectorizer()
        found = [
            (hashed.transform(texts) @ self.weights + self.bias).astype(np.float32)
            for texts in _batches(map(_beginning, documents))
        ]
        return np.concatenate([np.zeros(0, np.float32), *found])


def train_classifier(positive: Source, negative: Source) -> Classifier:
    """Train a classifier on two sources of examples; equal examples give equal weights. Raise
    `UserError` without scikit-learn, or with too few examples of a kind."""
    hashed = _vectorizer()
    from scipy.sparse import vstack
    from sklearn.linear_model import SGDClassifier
    from sklearn.metrics import balanced_accuracy_score, roc_auc_score

    began, n_bytes = time.process_time(), 0
    features, labels = [], []
    for source, label in ((positive, 1), (negative, 0)):
        share, n_texts = min(1.0, _MOST_BYTES / max(1, source.size())), 0
        texts = filter(str.strip, evenly(map(_beginning, source.documents()), share))
        for batch in _batches(texts):
            features.append(hashed.transform(batch))
            labels += [label] * len(batch)
            n_texts += len(batch)
            n_bytes += sum(len(text.encode("utf-8", "surrogatepass")) for text in batch)
        if n_texts < _LEAST:
            raise UserError(
                f"--classify: {source.name} has {n_texts} documents with text (rows, or whole text "
                f"files), but must have at least {_LEAST}"
            )
    seconds = time.process_time() - began
    all_features, all_labels = vstack(features, "csr"), np.array(labels)
    is_held_out = np.zeros(len(labels), bool)
    for label in (0, 1):
        is_held_out[np.flatnonzero(all_labels == label)[::_HELD_OUT]] = True
    model = SGDClassifier(
        loss="log_loss",
        alpha=1e-6,
        max_iter=_PASSES,
        tol=None,
        class_weight="balanced",
        random_state=0,
    ).fit(all_features[~is_held_out], all_labels[~is_held_out])
    weights, bias = model.coef_[0], float(model.intercept_[0])
    scores, truth = all_features[is_held_out] @ weights + bias, all_labels[is_held_out]
    n, m = int((truth == 1).sum()), int((truth == 0).sum())
    measured = Measured(
        len(truth),
        float(balanced_accuracy_score(truth, scores > 0)),
        float(roc_auc_score(truth, scores)),
        0.5 + 1.96 * math.sqrt((n + m + 1) / (12 * n * m)),
        seconds / max(1, n_bytes),
    )
    return Classifier(weights, bias, measured)


def _vectorizer() -> "HashingVectorizer":
    try:
        from sklearn.feature_extraction.text import HashingVectorizer
    except ImportError:
        raise UserError(
            "--classify needs the package scikit-learn: pip install 'torchtitan[classify]'"
        ) from None
    return HashingVectorizer(
        n_features=_FEATURES, ngram_range=(1, 2), token_pattern=r"\w+", alternate_sign=False
    )


def _beginning(document: Document) -> str:
    """Return the start of a document, and read its other chunks."""
    taken, left = [], _CHARACTERS
    for chunk in document:
        if left > 0:
            taken.append(chunk[:left])
            left -= len(chunk)
    return "".join(taken)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield consecutive texts, of about `_BATCH` characters."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
