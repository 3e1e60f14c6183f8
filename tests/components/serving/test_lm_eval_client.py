"""lm-eval's client of the API gives the scores of the adapter that `torchtitan eval` uses."""

import types

import pytest

from tests.components.serving.servers import listening, make_app
from torchtitan.components.evaluation import Scorer

pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install 'torchtitan[eval]')")
pytest.importorskip("tenacity", reason="lm-eval's clients of APIs need tenacity")

PAIRS = [
    ("Once upon a", " time"),
    ("Once upon a", " dog. She was sad"),
    ("Once upon a ", "time"),
    ("The cat", " sat."),
    ("Lily and Tom went to the park.", " They saw a big dog."),
]


def requests(*args):
    return [types.SimpleNamespace(args=one) for one in args]


@pytest.mark.slow
@pytest.mark.parametrize("n_at_once", [1, 4])
def test_scores_equal_our_adapter(stories, stories_model, stories_tokenizer, n_at_once):
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from torchtitan.components.evaluation.lm_eval_adapter import TorchtitanLM

    ours = TorchtitanLM(Scorer(stories_model), stories_tokenizer, {2})
    app, _ = make_app(stories)
    with listening(app) as port:
        theirs = LocalCompletionsAPI(
            base_url=f"http://127.0.0.1:{port}/v1/completions",
            model="stories",
            tokenizer=str(stories),
            tokenizer_backend="huggingface",
            add_bos_token=True,
            max_length=512,
            batch_size=2,
            num_concurrent=n_at_once,
        )
        found = theirs.loglikelihood(requests(*PAIRS), disable_tqdm=True)
        options = {"until": ["."], "max_gen_toks": 20}
        contexts = requests(("Once upon a time", options), ("The cat", options))
        texts = theirs.generate_until(contexts, disable_tqdm=True)
    expected = ours.loglikelihood(requests(*PAIRS))
    for (logprob, is_greedy), (own, own_is_greedy) in zip(found, expected, strict=True):
        # float32 sums in another order, in batches of other lengths
        assert logprob == pytest.approx(own, abs=1e-4) and is_greedy == own_is_greedy
    assert {is_greedy for _, is_greedy in expected} == {True, False}
    assert texts == ours.generate_until(contexts)
