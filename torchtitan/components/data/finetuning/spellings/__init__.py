"""One normal form of turns from every spelling in public data.

A message has `role`, `content`, and the assistant's may have `reasoning_content` and `tool_calls`,
as in OpenAI's chat format. Results of calls have the role `tool` and the `tool_call_id` of their
call. `docs/fine_tuning.md` lists the spellings. Invalid turns stay unchanged: `normalize` reports
them.

| module | step |
|---|---|
| `reader` | all turns of a row, and the results of calls to their calls |
| `single_turns`, `roles` | one turn to a message; its role |
| `answers` | the assistant's messages: `reasoning`, `calls`, text |
| `calls`, `parts`, `reasoning` | what messages contain |
| `tool_schemas` | the arguments of tools |
"""
