"""Write the tokens of a JSON Lines file with datatrove or litdata, as their documentation shows, in
one process.

python run_tokenizer.py {datatrove|litdata} FILE.jsonl TOKENIZER.json FOLDER
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def with_datatrove(source: Path, tokenizer: Path, folder: Path) -> None:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    reader = JsonlReader(str(source.parent), glob_pattern=source.name)
    writer = DocumentTokenizer(
        str(folder / "tokens"), tokenizer_name_or_path=str(tokenizer), eos_token=None
    )
    LocalPipelineExecutor(
        [reader, writer], tasks=1, workers=1, logging_dir=str(folder / "logs")
    ).run()


class _Tokens:
    """Tokens of the documents of a file; it can be pickled."""

    def __init__(self, tokenizer: Path):
        self.path = str(tokenizer)

    def __call__(self, source: str) -> Iterator[Any]:
        import torch
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(self.path)
        with open(source) as lines:
            for line in lines:
                yield torch.tensor(
                    tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids
                )


def with_litdata(source: Path, tokenizer: Path, folder: Path) -> None:
    from litdata import TokensLoader, optimize

    optimize(
        fn=_Tokens(tokenizer),
        inputs=[str(source)],
        output_dir=str(folder / "tokens"),
        chunk_bytes="64MB",
        item_loader=TokensLoader(),
        num_workers=1,
    )


if __name__ == "__main__":
    write = {"datatrove": with_datatrove, "litdata": with_litdata}[sys.argv[1]]
    write(*map(Path, sys.argv[2:]))
