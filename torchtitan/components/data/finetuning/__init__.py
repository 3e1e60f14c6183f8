"""Fine-tuning data: rows of a table to conversations, conversations to tokens, tokens to windows.

| modules | step |
|---|---|
| `row_formats`, `columns`, `functions` | the format of a row, by its columns or a user's function |
| `conversions`, `spellings`, `calls_in_text` | a row to a conversation, from any spelling |
| `conversation`, `losses` | conversations, checked; parts of messages that a template omits |
| `turns`, `attempts`, `faults` | a conversation to prompts and turns of the assistant |
| `renderings`, `completions`, `markers` | the texts that these compare |
| `chat_encoding`, `sample_texts`, `token_places` | turns to tokens and a training mask |
| `template_tokens` | special tokens of a template that the vocabulary lacks |
| `encoded`, `row_encoder` | samples as tokens; the base class of row encoders |
| `row_batches`, `filters` | many rows: encoded in processes, filtered, counted |
| `sample_cache` | samples on disk |
| `samples` | samples that fit into a window, and batches of windows |
| `rows_loader` | options of all loaders, and what tells kinds of rows apart |
| `planned_loader` | batches of samples whose lengths are known; `streams`: of streamed rows |
| `sft`, `preference`, `prompts`, `answered_prompts` | the kinds of rows |
| `prompt_position`, `prompt_streams` | prompts for methods that sample answers |
"""
