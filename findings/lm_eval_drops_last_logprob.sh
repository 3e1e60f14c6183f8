#!/usr/bin/env bash
# Guess: lm-eval's client of OpenAI's API, local-completions, scores a continuation by the entries
# that `echo` and `logprobs` return for the tokens of its prompt.
#
# Truth: lm-eval 0.4.13 asks for one new token (max_tokens=1), and drops the last entry of the answer
#   without comparing their number with its prompt's. From a server that returns no entry for the new
#   token, because it is the stop token, or because nothing is generated for a prompt that is only
#   scored, it gets the sum without the continuation's last token. A continuation of one token has a
#   log-probability of 0, the best of all choices, and counts as greedy.
#
# What a trainer must do: a server returns an entry for each token of the prompt, the first null, and
# one for each new token, also for the stop token. Compare lm-eval's scores over a server with those
# in memory before trusting them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "lm-eval[api]==0.4.13"
cat > "$folder/try.py" <<'PYTHON'
import importlib.metadata

from lm_eval.models.openai_completions import LocalCompletionsAPI

print("lm-eval", importlib.metadata.version("lm-eval"))


def answer(prompts, new_tokens):
    """Answer of a server for which each token has the log-probability -1 and is the best."""
    choices = []
    for index, ids in enumerate(prompts):
        tokens = [str(token) for token in ids] + new_tokens
        values = [None, *[-1.0] * (len(tokens) - 1)]
        tops = [value and {token: value} for token, value in zip(tokens, values)]
        logprobs = {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops}
        choices.append({"index": index, "text": "", "logprobs": logprobs})
    return {"choices": choices}


# A context of three tokens with continuations of one and three tokens.
prompts = [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]
read = LocalCompletionsAPI.parse_logprobs
with_entry = read(answer(prompts, ["stop"]), tokens=prompts, ctxlens=[3, 3])
without = read(answer(prompts, []), tokens=prompts, ctxlens=[3, 3])
print("with an entry of the new token:", with_entry)
print("without:", without)
assert with_entry == [(-1.0, True), (-3.0, True)]
assert without == [(0, True), (-2.0, True)]
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/try.py"
