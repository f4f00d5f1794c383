"""lm-evaluation-harness on a GGUF file, ternary or not, in this process: all of its tasks.

    pip install 'lm-eval[api]'
    python examples/evaluation/tern_lm.py model.gguf --tasks endings --include examples/evaluation

Tasks that score given answers need the probability of every token of a text, which llama-server does not
tell. Here llama.cpp is called through `ggml_tern.Llama`, so nothing goes over a server.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
from tqdm import tqdm

from ggml_tern import Llama

#: Whether texts begin with a special token; in files that do not say, they do if there is one.
ADD_BOS = "tokenizer.ggml.add_bos_token"


class TernLM(TemplateLM):  # type: ignore[misc]
    """A GGUF file as a model of the harness. Texts longer than n_ctx lose their beginning."""

    def __init__(self, model: Path, n_ctx: int) -> None:
        super().__init__()
        self._llm = Llama(str(model), n_ctx=n_ctx, logits_all=True, verbose=False)
        self._n_ctx = n_ctx

    @property
    def eot_token_id(self) -> int:
        return self._llm.token_eos()

    @property
    def prefix_token_id(self) -> int:
        """What a text without a beginning is taken to follow."""
        bos = self._llm.token_bos()
        return bos if bos >= 0 else self.eot_token_id

    def tok_encode(self, string: str, **_: Any) -> list[int]:
        return self._llm.tokenize(string.encode(), add_bos=False, special=False)

    def _log_probabilities(self, tokens: list[int]) -> npt.NDArray[np.float64]:
        """[len(tokens), n_vocab]: row i is of the token that follows tokens[:i + 1]."""
        self._llm.reset()  # type: ignore[no-untyped-call]
        self._llm.eval(tokens)
        logits = np.asarray(self._llm.scores[: len(tokens)], np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return logits

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Of each continuation of a context, and whether greedy decoding would give it."""
        bos = [self.prefix_token_id] if self._llm.metadata.get(ADD_BOS) == "true" else []
        found = []
        for _, context, continuation in tqdm(requests, disable=disable_tqdm):
            start = context if context[:1] == bos or not bos else bos + context
            tokens = (start + continuation)[-self._n_ctx - 1 :]
            rows = self._log_probabilities(tokens[:-1])[-len(continuation) :]
            each = rows[np.arange(len(rows)), tokens[-len(rows) :]]
            is_greedy = bool((rows.argmax(axis=1) == tokens[-len(rows) :]).all())
            found.append((float(each.sum()), is_greedy))
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        found = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self._n_ctx, 1)
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            found.append(sum(value for value, _ in self._loglikelihood_tokens(parts, disable_tqdm)))
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        found = []
        for context, how in (request.args for request in tqdm(requests, disable=disable_tqdm)):
            answer = self._llm.create_completion(
                context,
                max_tokens=how.get("max_gen_toks", 256),
                temperature=how.get("temperature", 0.0),
                stop=how.get("until", []),
                stream=True,
            )
            found.append("".join(piece["choices"][0]["text"] for piece in answer))  # type: ignore[index]
        return found


@click.command(help=__doc__.split("\n")[0])
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--tasks", required=True, help="Names of tasks, with commas between.")
@click.option("--include", type=click.Path(exists=True), help="A folder with tasks of your own.")
@click.option("--limit", type=int, help="Examples of each task.")
@click.option("--context", "n_ctx", default=2048, show_default=True, help="In tokens.")
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write the results to this file too.")
def main(
    model: Path, tasks: str, include: str | None, limit: int | None, n_ctx: int, out: Path | None
) -> None:
    results = simple_evaluate(
        model=TernLM(model, n_ctx),
        tasks=tasks.split(","),
        task_manager=TaskManager(include_path=include),
        limit=limit,
    )
    click.echo(make_table(results))
    if out is not None:
        out.write_text(json.dumps(results["results"], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
